"""Exercises about classes that have a few attributes, and about classes that hold objects of those."""

import random
from collections.abc import Callable
from typing import NamedTuple

from tools.demo_corpus.exercise import Lesson


class _Field(NamedTuple):
    """name: what the attribute is called. hint: its type. value: an example, as source."""

    name: str
    hint: str
    value: str


_RECORDS = {
    "Person": (_Field("name", "str", '"Ada"'), _Field("age", "int", "36")),
    "Book": (_Field("title", "str", '"Emma"'), _Field("author", "str", '"Jane Austen"'), _Field("pages", "int", "474")),
    "Car": (_Field("make", "str", '"Volvo"'), _Field("year", "int", "1999"), _Field("speed", "int", "0")),
    "Student": (_Field("name", "str", '"Alan"'), _Field("grade", "int", "90")),
    "Employee": (_Field("name", "str", '"Grace"'), _Field("salary", "float", "5000")),
    "Product": (_Field("name", "str", '"lamp"'), _Field("price", "float", "20"), _Field("quantity", "int", "3")),
    "Movie": (_Field("title", "str", '"Metropolis"'), _Field("year", "int", "1927")),
    "City": (_Field("name", "str", '"Bern"'), _Field("population", "int", "134000")),
    "Player": (_Field("name", "str", '"Max"'), _Field("score", "int", "0")),
    "Song": (
        _Field("title", "str", '"Yesterday"'),
        _Field("artist", "str", '"The Beatles"'),
        _Field("seconds", "int", "125"),
    ),
    "Animal": (_Field("name", "str", '"Rex"'), _Field("age", "int", "4")),
    "Order": (_Field("customer", "str", '"Ada"'), _Field("amount", "float", "12")),
    "Color": (_Field("red", "int", "255"), _Field("green", "int", "128"), _Field("blue", "int", "0")),
    "Message": (_Field("sender", "str", '"Ada"'), _Field("text", "str", '"Hello"')),
}
_COLLECTIONS = (
    ("Team", "player", "Player"),
    ("Library", "book", "Book"),
    ("Garage", "car", "Car"),
    ("Course", "student", "Student"),
    ("Company", "employee", "Employee"),
    ("Inventory", "product", "Product"),
    ("Playlist", "song", "Song"),
    ("Zoo", "animal", "Animal"),
)
_DATACLASS_PROBABILITY = 0.3
_RECORD_METHOD_PROBABILITY = 0.6
_COLLECTION_METHOD_PROBABILITY = 0.5


def record_class(rng: random.Random) -> Lesson:
    """Write a class with a few attributes, as a dataclass or with a constructor."""
    name, fields = rng.choice(list(_RECORDS.items()))
    first = fields[0]
    phrase = _with_article(name.lower()).capitalize()
    doc = rng.choice((f"{phrase}.", f"{phrase} with its {first.name}."))
    methods = _record_methods(rng, name, fields)
    if rng.random() < _DATACLASS_PROBABILITY:
        lines = "\n".join(f"    {field.name}: {field.hint}" for field in fields)
        code = f'@dataclass\nclass {name}:\n    """{doc}"""\n\n{lines}\n'
    else:
        code = _class_with_constructor(name, doc, fields)
    kept = [method for method in methods if rng.random() < _RECORD_METHOD_PROBABILITY]
    made = f"{name.lower()} = {name}({_example_values(fields)})"
    return Lesson("\n".join([code, *kept]), (made,), (f"{name.lower()}.{first.name} == {first.value}",))


def collection_class(rng: random.Random) -> Lesson:
    """Write a class that holds objects of another one, which stands before it."""
    name, item, item_class = rng.choice(_COLLECTIONS)
    fields = _RECORDS[item_class]
    items, key = f"{item}s", fields[0]
    add = rng.choice((f"add_{item}", "add"))
    doc = rng.choice((f"{_with_article(name.lower()).capitalize()} with its {items}.", f"A collection of {items}."))
    optional = _collection_methods(rng, item, item_class, fields)
    methods = [
        f"    def __init__(self) -> None:\n        self.{items} = []\n",
        _method(
            f"{add}(self, {item}: {item_class}) -> None", f"Add {_with_article(item)}.", f"self.{items}.append({item})"
        ),
        *(method for method in optional if rng.random() < _COLLECTION_METHOD_PROBABILITY),
    ]
    item_code = _class_with_constructor(item_class, f"{_with_article(item).capitalize()}.", fields)
    code = "\n".join([item_code, "", f'class {name}:\n    """{doc}"""\n', *methods])
    variable = name.lower()
    uses = (f"{variable} = {name}()", f"{variable}.{add}({item_class}({_example_values(fields)}))")
    return Lesson(code, uses, (f"{variable}.{items}[0].{key.name} == {key.value}",))


def _record_methods(rng: random.Random, name: str, fields: tuple[_Field, ...]) -> list[str]:
    """Return the methods that a class with these attributes can have."""
    first, last = fields[0].name, fields[-1].name
    values = ", ".join(f"{{self.{field.name}}}" for field in fields)
    shown = ", ".join(f"{{self.{field.name}!r}}" for field in fields)
    texts = (
        f'    def __str__(self) -> str:\n        return f"{values}"\n',
        f'    def __str__(self) -> str:\n        return f"{{self.{first}}} ({{self.{last}}})"\n',
        f'    def __repr__(self) -> str:\n        return f"{name}({shown})"\n',
    )
    methods = [rng.choice(texts)]
    for field, hint, _ in fields[1:]:
        if hint == "str":
            continue
        verb, sign = rng.choice((("increase", "+"), ("decrease", "-")))
        doc = f"{verb.capitalize()} the {field}."
        methods.append(_method(f"{verb}_{field}(self, amount: {hint}) -> None", doc, f"self.{field} {sign}= amount"))
        methods.append(f"    def __lt__(self, other: object) -> bool:\n        return self.{field} < other.{field}\n")
    rows = [f'    "{field.name}": self.{field.name},' for field in fields]
    methods.append(_method("to_dict(self) -> dict", "Return the attributes as a dictionary.", "return {", *rows, "}"))
    methods.append(
        "    def __eq__(self, other: object) -> bool:\n"
        f"        return isinstance(other, {name}) and self.{first} == other.{first}\n"
    )
    return methods


def _collection_methods(rng: random.Random, item: str, item_class: str, fields: tuple[_Field, ...]) -> list[str]:
    """Return the methods that a class that holds such objects can have."""
    items, key = f"{item}s", fields[0].name
    number = next(field.name for field in reversed(fields) if field.hint != "str")
    search = f"for {item} in self.{items}:"
    total = f"sum({item}.{number} for {item} in self.{items})"
    find = _method(
        f"find(self, {key}: str) -> {item_class} | None",
        f"Return the {item} with this {key}, or None.",
        search,
        f"    if {item}.{key} == {key}:",
        f"        return {item}",
        "return None",
    )
    find_all = _method(
        f"find_by_{key}(self, {key}: str) -> list[{item_class}]",
        f"Find {items} by their {key}.",
        f"return [{item} for {item} in self.{items} if {item}.{key} == {key}]",
    )
    return [
        rng.choice((find, find_all)),
        _method(
            f"remove(self, {item}: {item_class}) -> None",
            f"Remove {_with_article(item)}.",
            f"self.{items}.remove({item})",
        ),
        _method(f"total_{number}(self) -> float", f"Return the sum of the {number} of all {items}.", f"return {total}"),
        _method(
            f"average_{number}(self) -> float",
            f"Return the average {number} of the {items}.",
            f"if not self.{items}:",
            "    return 0.0",
            f"return {total} / len(self.{items})",
        ),
        _method(
            f"sorted_by_{number}(self) -> list[{item_class}]",
            f"Return the {items}, sorted by {number}.",
            f"return sorted(self.{items}, key=lambda {item}: {item}.{number})",
        ),
        _method("__len__(self) -> int", f"Return the number of {items}.", f"return len(self.{items})"),
        _method(f"print_{items}(self) -> None", f"Print all {items}.", search, f"    print({item}.{key})"),
    ]


def _class_with_constructor(name: str, doc: str, fields: tuple[_Field, ...]) -> str:
    arguments = ", ".join(f"{field.name}: {field.hint}" for field in fields)
    lines = "\n".join(f"        self.{field.name} = {field.name}" for field in fields)
    return f'class {name}:\n    """{doc}"""\n\n    def __init__(self, {arguments}) -> None:\n{lines}\n'


def _method(signature: str, doc: str, *body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body)
    return f'    def {signature}:\n        """{doc}"""\n{lines}\n'


def _example_values(fields: tuple[_Field, ...]) -> str:
    return ", ".join(field.value for field in fields)


def _with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


RECORD_CLASSES: tuple[Callable[[random.Random], Lesson], ...] = (record_class, record_class, collection_class)
