"""MCORE_PATCH_VERIFY=1, on masters that are plain tensors."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from mcore_patch._stations.optimizers import Master  # noqa: E402
from mcore_patch._stations.verify import VerificationError, verified, wrote  # noqa: E402


def master_in(buffer: torch.Tensor) -> Master:
    def write(begin: int, values: torch.Tensor) -> None:
        buffer[begin : begin + values.numel()].copy_(values)

    return Master(torch.nn.Parameter(buffer.bfloat16()), 0, buffer.numel(), "Optimizer", lambda: buffer, write)


def test_one_line_says_that_nothing_differs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.INFO, "mcore_patch"), verified("reload"):
        wrote("w", master_in(torch.full((5,), float("nan"))), torch.full((5,), float("nan")))
        wrote("v", master_in(torch.ones(3)), torch.ones(3, dtype=torch.bfloat16))
    assert [record.getMessage() for record in caplog.records] == [
        "mcore_patch: rank 3: reload: verified 2 masters, 8 elements: 0 differ from their source"
    ]


def test_a_difference_is_raised_with_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")
    shared = torch.zeros(4)

    @verified("reload")
    def write() -> None:
        wrote("first", master_in(shared[:3]), torch.zeros(3))
        shared[1:].fill_(-0.0)  # written later, over a part of the first
        wrote("second", master_in(shared[3:]), torch.full((1,), -0.0))

    with pytest.raises(VerificationError, match=r"2 differ from their source \(first: 2 of 3\)"):
        write()
    with verified("reload"):
        pass  # nothing is left of the failure


def test_what_is_raised_inside_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")

    @verified("reload")
    def write() -> None:
        wrote("w", master_in(torch.zeros(1)), torch.ones(1))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()


def test_without_the_variable_nothing_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mcore_patch"), verified("reload"):
        wrote("w", master_in(torch.zeros(1)), torch.ones(1))
    assert caplog.records == []


def test_the_first_five_of_many_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MCORE_PATCH_VERIFY", "1")
    monkeypatch.delenv("RANK", raising=False)
    for count, more in ((5, ""), (7, "; and 2 more")):
        caplog.clear()

        @verified("reload")
        def write(count: int = count) -> None:
            for index in range(count):
                wrote(f"w{index}", master_in(torch.zeros(3)), torch.tensor([0.0, 0.0, 1.0]))

        with pytest.raises(VerificationError) as raised:
            write()
        named = "; ".join(f"w{index}: 1 of 3" for index in range(5))
        line = (
            f"mcore_patch: rank 0: reload: verified {count} masters, {3 * count} elements: "
            f"{count} differ from their source ({named}{more})"
        )
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("ERROR", line)]
        assert str(raised.value).startswith(line)
        assert "MCORE_PATCH=0" in str(raised.value)


def test_every_piece_is_counted_and_no_count_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_patch._stations import parameters, verify

    monkeypatch.setattr(parameters, "CHUNK", 2)
    monkeypatch.setattr(verify, "differing", lambda source, held: torch.tensor(2**24 + 1))
    assert verify._differing(master_in(torch.zeros(3)), torch.zeros(3)) == 2 * (2**24 + 1)
