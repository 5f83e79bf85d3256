from tools.demo_corpus.spelling import Style, respell

_CODE = '''\
class Stack:
    """A stack."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def push(self, item: int, *rest: int, last: bool = True) -> None:
        """Add an item."""
        # The last one is on top.
        self.items.append(item or "it's")

    def name(self) -> str:
        return "stack"
'''


def test_a_style_with_everything_changes_nothing() -> None:
    assert respell(_CODE, Style(True, True, True, False)) == _CODE


def test_a_style_with_nothing_leaves_the_bare_code() -> None:
    assert respell(_CODE, Style(False, False, False, True)) == (
        "class Stack:\n"
        "    def __init__(self):\n"
        "        self.items = []\n"
        "\n"
        "    def push(self, item, *rest, last=True):\n"
        '        self.items.append(item or "it\'s")\n'
        "\n"
        "    def name(self):\n"
        "        return 'stack'\n"
    )
