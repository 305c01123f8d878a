"""The text of `--program`: single steps and ranges, forwards and backwards; everything else is refused."""

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import parse_order


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("0", [0]),
        ("7", [7]),
        ("3,3,3", [3, 3, 3]),
        ("0-7", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("0-3,2-3,7-4", [0, 1, 2, 3, 2, 3, 7, 6, 5, 4]),
        ("5-5", [5]),
        (" 0 - 2 , 1 ", [0, 1, 2, 1]),
        ("007", [7]),
    ],
)
def test_legal_texts(text, order):
    assert parse_order(text, 8) == order


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            ",",
            "0,",
            ",0",
            "0,,1",
            "8",
            "0-8",
            "8-0",
            "-1",
            "0--1",
            "0-1-2",
            "a",
            "0..3",
            "1.0",
            "0;1",
        ),
        # "1 2" is not 12, digits are those of ASCII, and a number may be too long for int().
        *("1 2", "1 -2 3", "٣", "9" * 5000, "0\n1"),
    ],
)
def test_other_texts_are_refused_in_one_line(text):
    with pytest.raises(UserError) as caught:
        parse_order(text, 8)
    message = str(caught.value)
    assert message.startswith(f"--program={text!r}: ") and "\n" not in message
    assert message.endswith("must be layers and ranges (7-4 runs backwards) such as 0-3,2-3,5, of 0 to 7")


def test_the_last_step_of_a_short_program():
    assert parse_order("0", 1) == [0]
    with pytest.raises(UserError, match=r"of 0 to 0$"):
        parse_order("1", 1)
