"""scripts/online_softmax.py: the recurrence, and the three ways to break it."""

import sys
from math import exp, inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import online_softmax  # noqa: E402
from online_softmax import JUMP, RISE, VARIANTS, Variant, softmax_average, trace  # noqa: E402

FULL, ONLY_L, ONLY_U, FORGETFUL, KEPT = VARIANTS


def final_error(row, variant, block=2):
    last = trace(*row, block, variant)[-1]
    return last.output - last.exact


def test_first_block_by_hand():
    (step, *_) = trace([1, 2, 1001, 1002], [2, -1, 4, 8], 2)
    assert step.m == 2
    assert step.l == pytest.approx(1 + exp(-1))
    assert step.u == pytest.approx(2 * exp(-1) - 1)


def test_jump_forgets_the_first_block_entirely():
    last = trace(*JUMP, 2)[-1]
    assert (last.m, last.l, last.u) == pytest.approx((1002, 1 + exp(-1), 4 * exp(-1) + 8))
    assert last.output == last.exact


def test_rise_from_5_to_10_multiplies_both_by_exp_minus_5():
    before, after, _ = trace(*RISE, 2)
    assert (before.m, after.m) == (5, 10)
    assert after.l == pytest.approx(before.l * exp(-5) + exp(-1) + 1)
    assert after.u == pytest.approx(before.u * exp(-5) + 4 * exp(-1) + 8)


@pytest.mark.parametrize("block", [1, 2, 4, 6, 9])
@pytest.mark.parametrize("variant", [FULL, KEPT])
def test_right_variants_are_exact_after_every_block(variant, block):
    for step in trace(*RISE, block, variant):
        assert step.output == pytest.approx(step.exact, rel=1e-14)


@pytest.mark.parametrize("variant", [ONLY_L, ONLY_U, FORGETFUL])
def test_wrong_variants_show_on_a_moderate_rise(variant):
    assert abs(final_error(RISE, variant)) > 1


def test_a_huge_jump_hides_the_forgotten_denominator_alone():
    assert final_error(JUMP, FORGETFUL) == 0
    assert abs(final_error(JUMP, ONLY_L)) > 0.1
    assert abs(final_error(JUMP, ONLY_U)) > 1


def test_masked_keys_count_for_nothing_and_their_values_are_not_read():
    steps = trace([-inf, -inf, 1, -inf], [inf, 5, 3, inf], 2)
    assert [step.output for step in steps] == [0, 3]
    assert steps[0] == (-inf, 0, 0, 0, 0)
    assert softmax_average([-inf], [inf]) == 0


def test_variants_differ_in_one_factor_each():
    default = Variant("")
    assert FULL[1:] == default[1:]
    for wrong, right in ((ONLY_L, FULL), (ONLY_U, FULL), (FORGETFUL, KEPT)):
        assert sum(a != b for a, b in zip(wrong[1:], right[1:], strict=True)) == 1


def test_command_shows_the_errors(capsys):
    assert online_softmax.main([]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("WRONG") == 2 + 6
    )  # (b), (c) after the jump; (b), (c), (d) twice after the rise
    assert "exp(-5)" in out


def test_command_on_own_numbers(capsys):
    argv = ["--scores=-inf,1,2", "--values=-1,0,4", "--block", "1"]
    assert online_softmax.main(argv) == 0
    out = capsys.readouterr().out
    assert f"{4 / (1 + exp(-1)):.6g}" in out
    assert "exp(-5)" not in out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--block", "0"], "--block must be at least 1, got 0"),
        (["--scores", "1,2"], "go together"),
        (["--scores", "1,2", "--values", "1"], "2 scores need as many values, got 1"),
        (["--scores", "1,x", "--values", "1,2"], "invalid floats value: '1,x'"),
        (["--scores", "nan", "--values", "1"], "scores must be finite"),
        (["--scores", "1", "--values", "inf"], "values must be finite"),
    ],
)
def test_bad_arguments_are_named(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        online_softmax.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "online.png"
    assert online_softmax.main(["--save", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert online_softmax.main(["--save", str(tmp_path / "absent" / "online.png")]) == 2
    assert "cannot save the figure" in capsys.readouterr().err
