"""The command line: the dispatcher, the demo's arguments and failures, and the demo on the release on the path."""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_patch
from mcore_patch import _cli
from mcore_patch._cli import demo
from mcore_patch._cli.demo_cases import CASES, Trained

NEVER_ROUNDED = Trained(masters=8, differing=0, losses=(3.0, 2.0))


def test_every_command_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        _cli.main(["--help"])
    assert exited.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for name, command in _cli.COMMANDS.items():
        assert name in said
        assert (command.__doc__ or "?").splitlines()[0] in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        _cli.main(["--version"])
    assert exited.value.code == 0
    assert mcore_patch.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [[], ["no-such-command"], ["demo", "--steps", "1"], ["demo", "--steps", "many"], ["demo", "--ranks", "0"]],
)
def test_wrong_arguments_are_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        _cli.main(argv)
    assert exited.value.code == 2
    assert "usage: mcore-patch" in capsys.readouterr().err


def test_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: argparse.Namespace) -> int:
        return 100 + int(options.steps)

    monkeypatch.setattr(demo, "run", run)
    assert _cli.main(["demo", "--steps", "7"]) == 107


@pytest.mark.parametrize("arguments", ["doctor --static", "inspect checkpoint", "run script.py"])
def test_a_reader_that_goes_early_is_no_error(arguments: str, tmp_path: Path) -> None:
    tensors = {f"tensor.{number}": {"dtype": "BF16", "shape": [1]} for number in range(3)}
    header = json.dumps(tensors).encode()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "script.py").write_text("print('x' * 10)\n")
    found, theirs = (
        _with_a_closed_pipe([sys.executable, *words], tmp_path)
        for words in (["-m", "mcore_patch", *arguments.split()], ["script.py"])
    )
    assert found == (theirs if arguments.startswith("run") else (141, ""))


def _with_a_closed_pipe(command: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and the standard error of a command whose output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=folder, timeout=100)
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("missing", list(demo.NEEDED))
def test_demo_names_what_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_installed", lambda module: module != missing)
    assert _cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert f"pip install 'mcore-patch[demo]' {demo.NEEDED[missing]}\n" in said.err
    assert not said.out
    assert not (tmp_path / "out").exists()


def test_the_command_line_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    code = (
        "import sys; from mcore_patch._cli import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'megatron', 'matplotlib'} & set(sys.modules)))"
    )
    # Elsewhere, so that the checkout is not found before the installed package.
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "stock, patched, expected",
    [
        (Trained(8, 7, (3.0, 2.5)), Trained(8, 0, (3.0, 2.0)), 0),
        (Trained(8, 7, (3.0, 2.5)), Trained(8, 1, (3.0, 2.0)), 1),
        (Trained(8, 7, (3.0, 2.5)), Trained(8, 0, (3.0, 2.0000000001)), 1),
        (Trained(8, 7, (3.0, 2.5)), Trained(8, 0, (3.0, float("nan"))), 1),
        (Trained(8, 0, (3.0, 2.5)), Trained(8, 0, (3.0, 2.0)), 1),
        (Trained(8, 7, (3.0, 2.0)), Trained(8, 0, (3.0, 2.0)), 1),
    ],
    ids=[
        "as promised",
        "a master differs",
        "a loss differs",
        "a loss is NaN",
        "stock kept masters",
        "stock kept losses",
    ],
)
def test_demo_judges_bit_for_bit(stock: Trained, patched: Trained, expected: int) -> None:
    assert demo._judge(stock, patched, NEVER_ROUNDED) == expected


def test_demo_says_that_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_installed", lambda module: module != "matplotlib")
    demo._draw(tmp_path / "picture.png", CASES[0], {}, {})
    assert "matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
