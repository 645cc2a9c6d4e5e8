"""Run with: pytest tests/unit/test_cannot_start.py. Why a program does not start, told by what is wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dflashctl.agent.runs.cannotstart import cannot_start


def why(cwd: Path, *command: str, path: str = "/usr/bin:/bin") -> str:
    """What is said of a start that really fails."""
    env = {"PATH": path}
    with pytest.raises(OSError) as failed:
        subprocess.run(command, cwd=cwd, env=env, check=False)
    return cannot_start(command, str(cwd), env, failed.value)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"#!/bin/bash\r\necho\r\n", 0o755, "has line ends of Windows"),
        (b"#!/bin/sh\r", 0o755, "has line ends of Windows"),
        (
            b"#!/opt/none/python3 -u\n",
            0o755,
            "asks for the interpreter /opt/none/python3, which is not there",
        ),
        (b"#! /opt/none/x\n", 0o755, "asks for the interpreter /opt/none/x, which is not there"),
        (b"#!/bin/sh\n", 0o644, "is not executable: chmod +x"),
        (b"echo hi\n", 0o755, "a script needs a first line such as #!/bin/sh"),
        (b"", 0o755, "a script needs a first line such as #!/bin/sh"),
        (b"\x7fELF but not quite", 0o755, "is no program for this machine"),
    ],
)
def test_a_script_that_is_there_is_never_called_missing(
    tmp_path: Path, content: bytes, mode: int, says: str
) -> None:
    """`No such file or directory: 'run.sh'` was said of a script from Windows that stood there."""
    (tmp_path / "run.sh").write_bytes(content)
    (tmp_path / "run.sh").chmod(mode)
    for command in ("./run.sh", str(tmp_path / "run.sh")):
        said = why(tmp_path, command)
        assert said.startswith(f"cannot start {command}: ") and says in said, said
        assert "No such file" not in said and "\n" not in said


def test_what_is_missing_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    assert why(tmp_path, "bin/x") == f"cannot start bin/x: there is no such file below {tmp_path}"
    assert why(tmp_path, "/no/x") == "cannot start /no/x: there is no such file"
    assert "no program of this name on the PATH (/usr/bin:/bin)" in why(tmp_path, "pyhton")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    assert f"but in {tmp_path}: write ./run.sh" in why(tmp_path, "run.sh")


def test_no_more_processes_are_no_fault_of_the_program() -> None:
    said = cannot_start(["python"], "/", {}, BlockingIOError(11, "Resource temporarily unavailable"))
    assert "pids.max" in said and "Errno" not in said


def test_a_folder_and_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "file").write_text("")
    assert why(tmp_path, "./app") == "cannot start ./app: it is a folder"
    assert "there is no such file below" in why(tmp_path, "file/x")


def test_another_error_is_told_as_it_is(tmp_path: Path) -> None:
    error = OSError(7, "Argument list too long")
    assert cannot_start(["x"], str(tmp_path), {}, error) == "cannot start x: [Errno 7] Argument list too long"
    assert "embedded null byte" in cannot_start(["x"], "/", {}, ValueError("embedded null byte"))
