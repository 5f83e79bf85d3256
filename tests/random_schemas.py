"""JSON schemas drawn at random from all that is admitted."""

from __future__ import annotations

import random

from cluster.parameters.json_types import JSON

_NAMES = ["a", "bc", "x y", 'quo"te', "é", "n0", "longer_name"]
_PATTERNS = [r"^[a-c]{2,4}$", r"^\d{3}-[x-z]+$", r"(ab|cd)e?", r"^[^a]\w$", r"\[\d+\]"]
_FORMATS = ["date", "time", "ipv4", "uuid"]
_CONSTANTS: list[JSON] = [None, True, 3, -2.5, "a", 'b"\n', "é🙂", [1, ["x"]], {"k": {"l": []}}]


def random_schema(seed: int) -> dict[str, JSON]:
    """One schema; the same seed gives the same."""
    drawer = _Drawer(random.Random(seed))
    schema = drawer.object(depth=3) if seed % 2 else drawer.schema(depth=3)
    return {**schema, "$defs": drawer.definitions} if drawer.definitions else schema


class _Drawer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, JSON] = {}
        if rng.random() < 0.3:
            self.definitions["d"] = self.schema(depth=1)

    def schema(self, depth: int) -> dict[str, JSON]:
        leaves = [self.string, self.integer, self.number, self.constant, self.enum, self.simple]
        inner = [self.object, self.object, self.array, self.tuple, self.any_of, self.one_of, self.free_names]
        if depth and self._rng.random() < 0.6:
            return self._rng.choice(inner)(depth)
        if self.definitions and self._rng.random() < 0.2:
            return {"$ref": "#/$defs/d"}
        return self._annotated(self._rng.choice(leaves)())

    def string(self) -> dict[str, JSON]:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": rng.choice(_FORMATS)}
            case 2:
                low = rng.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(4)}
        return {"type": "string", "maxLength": rng.randrange(6)}

    def integer(self) -> dict[str, JSON]:
        low = self._rng.randint(-2000, 2000)
        limits: dict[str, JSON] = {"minimum": low, "maximum": low + self._rng.choice([0, 3, 150, 100_000])}
        choices: list[dict[str, JSON]] = [
            {},
            limits,
            {"exclusiveMinimum": low, "exclusiveMaximum": low + 20},
            {"multipleOf": self._rng.choice([1, 2, 7])},
            {"minimum": low},
            {"maximum": low},
        ]
        return {"type": "integer", **self._rng.choice(choices)}

    def number(self) -> dict[str, JSON]:
        low = round(self._rng.uniform(-50, 50), self._rng.randrange(3))
        choices: list[dict[str, JSON]] = [
            {},
            {"minimum": low, "maximum": low + self._rng.choice([0.5, 7, 1000])},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + 1.5},
        ]
        types: list[JSON] = ["number", ["number", "null"]]
        return {"type": self._rng.choice(types), **self._rng.choice(choices)}

    def constant(self) -> dict[str, JSON]:
        return {"const": self._rng.choice(_CONSTANTS)}

    def enum(self) -> dict[str, JSON]:
        return {"enum": self._rng.sample(_CONSTANTS, self._rng.randint(1, 4))}

    def simple(self) -> dict[str, JSON]:
        types: list[JSON] = ["null", "boolean", ["boolean", "null"]]
        return {"type": self._rng.choice(types)}

    def object(self, depth: int) -> dict[str, JSON]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(1, 4))
        required: list[JSON] = [name for name in names if rng.random() < 0.6]
        schema: dict[str, JSON] = {
            "type": "object",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": required,
        }
        if rng.random() < 0.3:
            schema["additionalProperties"] = rng.choice([False, False, self.integer()])
        elif rng.random() < 0.3:
            schema["maxProperties"] = rng.randint(max(1, len(required)), len(names))
        return schema

    def free_names(self, depth: int) -> dict[str, JSON]:
        values = self.schema(depth - 1)
        if self._rng.random() < 0.5:
            return {
                "type": "object",
                "patternProperties": {"^k[a-z]$": values},
                "additionalProperties": False,
                "maxProperties": 2,
            }
        return {"type": "object", "additionalProperties": values, "minProperties": 1, "maxProperties": 2}

    def array(self, depth: int) -> dict[str, JSON]:
        low = self._rng.randrange(3)
        return {
            "type": "array",
            "items": self.schema(depth - 1),
            "minItems": low,
            "maxItems": low + self._rng.randrange(3),
        }

    def tuple(self, depth: int) -> dict[str, JSON]:
        items: list[JSON] = [self.schema(depth - 1) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": self._rng.randint(0, len(items))}

    def any_of(self, depth: int) -> dict[str, JSON]:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def one_of(self, depth: int) -> dict[str, JSON]:
        tagged: list[JSON] = []
        for tag in self._rng.sample(["u", "v", "w"], 2):
            branch: dict[str, JSON] = {
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": self.schema(depth - 1)},
                "required": ["kind"],
            }
            tagged.append(branch)
        return {"oneOf": [*tagged, {"type": "integer"}]}

    def _annotated(self, schema: dict[str, JSON]) -> dict[str, JSON]:
        return {**schema, "description": "of no consequence"} if self._rng.random() < 0.2 else schema
