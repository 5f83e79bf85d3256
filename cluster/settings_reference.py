"""The reference of all settings, generated from the pydantic models that declare them.

It has two forms: docs/settings.md (`to_markdown`), which a test compares with the models, and a YAML file with every
setting and its default (`to_yaml`), which `raypd serve --config` accepts.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import ClusterConfig

_COMMENT_WIDTH: Final = 100
_TYPE_NAMES: Final = {"integer": "integer", "number": "number", "string": "string", "boolean": "true or false"}
_LOWER_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "minLength": "characters ≥", "minItems": "entries ≥"}
_UPPER_BOUNDS: Final = {"maximum": "≤", "exclusiveMaximum": "<", "maxLength": "characters ≤", "maxItems": "entries ≤"}

Schema = Mapping[str, Any]
"""A JSON schema, or a part of one."""


@dataclass(frozen=True, slots=True)
class Section:
    """One group of settings.

    paths: the group's positions in the settings file, such as "ingress.http"; the top level is ""
    model: the class that declares the group
    """

    paths: tuple[str, ...]
    model: type[BaseModel]

    @property
    def title(self) -> str:
        """The section's heading in docs/settings.md."""
        if self.paths == ("",):
            return "Top level"
        columns = [list(dict.fromkeys(names)) for names in zip(*(path.split(".") for path in self.paths), strict=True)]
        return "`" + ".".join(name[0] if len(name) == 1 else "{" + ", ".join(name) + "}" for name in columns) + "`"

    @property
    def anchor(self) -> str:
        """The link target that Markdown renderers make of the heading."""
        return "".join(c for c in self.title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def sections(root: type[BaseModel] = ClusterConfig) -> list[Section]:
    """List every group of settings below root, in the order in which the file has them.

    A group that overrides another one (`prefill.scheduler`) is not listed again.
    """
    paths: dict[type[BaseModel], list[str]] = {}
    for path, model in _groups(root, ""):
        paths.setdefault(model, []).append(path)
    depth = {model: min(path.count(".") for path in found) for model, found in paths.items()}
    return [
        Section(tuple(path for path in found if path.count(".") == depth[model]), model)
        for model, found in paths.items()
    ]


def to_schema() -> str:
    """Return the JSON schema of the settings file, for editors and other programs."""
    return json.dumps(ClusterConfig.model_json_schema(), indent=2)


def to_yaml(config: ClusterConfig | None = None) -> str:
    """Return a settings file that has every setting, with its description as a comment.

    config: the settings whose values the file gets; default: the default settings
    """
    return "\n".join(_yaml_lines(ClusterConfig() if config is None else config, indent=0)) + "\n"


def to_markdown() -> str:
    """Return the content of docs/settings.md."""
    found = sections()
    anchors = {section.model.__name__: section.anchor for section in found}
    schema = ClusterConfig.model_json_schema()
    definitions: dict[str, Schema] = {**schema["$defs"], ClusterConfig.__name__: schema}
    parts = [_INTRODUCTION]
    for section in found:
        properties = definitions[section.model.__name__]["properties"]
        rows = [
            _row(name, field, properties[name], definitions, anchors)
            for name, field in section.model.model_fields.items()
        ]
        text = " ".join((section.model.__doc__ or "").split())
        header = "| setting | type | default | what it is |\n|---|---|---|---|"
        parts.append(f"## {section.title}\n\n{text}\n\n{header}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


_INTRODUCTION: Final = """\
# Settings

<!-- Made from the code by `make settings`; do not edit it by hand. -->

`raypd serve --config FILE` reads these settings from a YAML file. Options of the command line override the file. Every
setting has a default, except those that are marked as required. Unknown settings, and values out of range, are refused
before anything starts. Names that end in `_s` are in seconds, `_mib` and `_gib` in MiB and GiB, `_bytes` in bytes.

```
raypd config --default > raypd.yaml   # all settings with their defaults and descriptions
raypd config --check raypd.yaml       # is it valid? Exit status 2 and a line for each mistake if not
raypd config --schema                 # JSON schema, for editors
```
"""


def _groups(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for nested in _models_in(field.annotation):
            yield from _groups(nested, f"{path}.{name}" if path else name)


def _models_in(annotation: Any) -> list[type[BaseModel]]:  # Any: a type, or a generic alias such as X | None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _row(
    name: str, field: FieldInfo, schema: Schema, definitions: Mapping[str, Schema], anchors: Mapping[str, str]
) -> str:
    kind = _type_of(schema, definitions, anchors)
    description = field.description or definitions.get(_reference(schema) or "", {}).get("description", "")
    cells = (f"`{name}`", kind, _default_of(field), " ".join(description.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _reference(schema: Schema) -> str | None:
    reference = schema.get("$ref")
    return None if reference is None else str(reference).rpartition("/")[2]


def _type_of(schema: Schema, definitions: Mapping[str, Schema], anchors: Mapping[str, str]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_of(option, definitions, anchors) for option in schema["anyOf"])
    if (name := _reference(schema)) is not None:
        return f"[group](#{anchors[name]})" if name in anchors else _type_of(definitions[name], definitions, anchors)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type_of(schema.get('items', {}), definitions, anchors)}" + _range_of(schema)
    if kind == "object":
        values = schema.get("additionalProperties")
        return (
            f"mapping of names to {_type_of(values, definitions, anchors)}" if isinstance(values, dict) else "mapping"
        )
    return ("path" if schema.get("format") == "path" else _TYPE_NAMES.get(str(kind), str(kind))) + _range_of(schema)


def _range_of(schema: Schema) -> str:
    bounds = [
        f"{sign} {_number(schema[key])}" for key, sign in (_LOWER_BOUNDS | _UPPER_BOUNDS).items() if key in schema
    ]
    return f" ({', '.join(bounds)})" if bounds else ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and not value.is_integer() else str(int(value))


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        changed = default.model_dump(mode="json", exclude_defaults=True)
        if "model" in changed:
            changed["model"] = "the demo model"
        return f"`{_inline(changed)}`" if changed else ""
    plain = json.loads(json.dumps(default, default=str))
    return f"`{_inline(plain)}`"


def _inline(value: Any) -> str:  # Any: whatever YAML can express
    """Return a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _yaml_lines(config: BaseModel, indent: int) -> Iterator[str]:
    margin = " " * indent
    plain = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        nested = isinstance(value, BaseModel)
        about = field.description or ((type(value).__doc__ or "") if nested else "")
        yield from (f"{margin}# {line}" for line in textwrap.wrap(" ".join(about.split()), _COMMENT_WIDTH - indent))
        if nested:
            yield f"{margin}{name}:"
            yield from _yaml_lines(value, indent + 2)
        else:
            yield f"{margin}{name}: {_inline(plain[name])}"
