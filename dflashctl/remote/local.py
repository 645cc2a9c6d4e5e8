"""Engine `local`: this machine, without ssh. Imports neither fabric nor paramiko."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from dflashctl.errors import NotFound, Unreachable, UsageError
from dflashctl.remote.engine import Completed, Engine, Progress, Stdin
from dflashctl.remote.environment import clean_environment
from dflashctl.remote.limits import check_argv

CHUNK = 1 << 16
QUIET_AFTER_EXIT_S = 1.0
"""A command that has ended may have left a child that holds its output open; that child is not waited for."""

TICK_S = 0.2

HEARD_BYTES = CHUNK
"""What a listener has been told is kept up to here only: a checkpoint that is pulled has gigabytes."""


class LocalEngine(Engine):
    """Runs commands as children of this process, in the same clean environment as every other engine."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        check_argv(argv)
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(self.host),
                # Away from our terminal: a Ctrl-C here must not reach what was started, as over ssh.
                start_new_session=True,
            )
        except FileNotFoundError:
            return _not_run(argv, 127, f"{argv[0]}: not found", started)
        except PermissionError:
            return _not_run(argv, 126, f"{argv[0]}: not executable", started)
        except OSError as error:
            raise UsageError(f"cannot start {argv[0]}: {error.strerror}", where=self.host.name) from error
        try:
            stdout, stderr = _drain(process, stdin, started + timeout_s, on_stdout)
        except TimeoutError:
            raise Unreachable(
                f"{argv[0]} did not end within {timeout_s:g} s; it may still be running (pid {process.pid})",
                where=self.host.name,
            ) from None
        finally:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        code = process.wait()
        return Completed(tuple(argv), _as_shell(code), stdout, stderr, time.monotonic() - started)

    def run_on_host(
        self,
        argv: Sequence[str],
        *,
        stdin: Stdin = b"",
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        return self.run(argv, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout)

    def put(
        self,
        source: Path,
        destination: str,
        *,
        mode: int = 0o644,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> None:
        try:
            _copy(source, Path(_absolute(destination)), mode, timeout_s, progress)
        except OSError as error:
            raise UsageError(f"cannot write {destination}: {error.strerror}", where=self.host.name) from error

    def get(
        self, source: str, destination: Path, *, timeout_s: float, progress: Progress | None = None
    ) -> None:
        try:
            _copy(Path(_absolute(source)), destination, None, timeout_s, progress)
        except FileNotFoundError:
            raise NotFound(f"no such file: {source}", where=self.host.name) from None
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror}", where=self.host.name) from error


def _drain(
    process: subprocess.Popen[bytes],
    stdin: Stdin,
    deadline: float,
    on_stdout: Callable[[bytes], None] | None,
) -> tuple[bytes, bytes]:
    """Feed stdin and read both streams together until both are closed, or quiet after the process has ended.

    Raises TimeoutError at `deadline` (time.monotonic); the process is left alone.
    """
    assert process.stdin and process.stdout and process.stderr
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    rest = memoryview(stdin if isinstance(stdin, bytes) else b"")
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            selector.register(stream, selectors.EVENT_READ)
        if rest:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        elif isinstance(stdin, bytes):
            process.stdin.close()
        else:
            threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
        moved_at = time.monotonic()
        while selector.get_map():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError
            if now - moved_at >= QUIET_AFTER_EXIT_S and process.poll() is not None:
                break
            for key, _ in selector.select(min(deadline - now, TICK_S)):
                moved_at = time.monotonic()
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(process.stdin.fileno(), rest[:CHUNK]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                stream = process.stdout if key.fileobj is process.stdout else process.stderr
                data = os.read(stream.fileno(), CHUNK)
                if not data:
                    selector.unregister(stream)
                    continue
                told = on_stdout if stream is process.stdout else None
                if told is None or len(kept[stream]) < HEARD_BYTES:
                    kept[stream] += data
                if told is not None:
                    told(data)
    try:
        process.wait(max(deadline - time.monotonic(), 0.001))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    return bytes(kept[process.stdout]), bytes(kept[process.stderr])


def _feed(sink: IO[bytes], pieces: Iterable[bytes]) -> None:
    """Send pieces as they come, then the end. A command that does not want them is no error."""
    with contextlib.suppress(OSError, ValueError), sink:
        for piece in pieces:
            sink.write(piece)
            sink.flush()


def _copy(
    source: Path, destination: Path, mode: int | None, timeout_s: float, progress: Progress | None
) -> None:
    """Copy beside the destination, then rename over it: never half a file, nor a file emptied by itself."""
    deadline = time.monotonic() + timeout_s
    aside = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    with source.open("rb") as reader:
        try:
            with aside.open("wb") as writer:
                total, done = os.fstat(reader.fileno()).st_size, 0
                while data := reader.read(1 << 20):
                    writer.write(data)
                    done += len(data)
                    if progress is not None:
                        progress(done, total)
                    if time.monotonic() > deadline:
                        raise Unreachable(f"copying {source} did not end within {timeout_s:g} s")
                if mode is not None:
                    os.fchmod(writer.fileno(), mode)
            aside.replace(destination)
        finally:
            aside.unlink(missing_ok=True)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"not an absolute path: {path!r}")
    return path


def _as_shell(code: int) -> int:
    """A death by signal as a shell reports it, so that all engines speak alike."""
    return 128 - code if code < 0 else code


def _not_run(argv: Sequence[str], code: int, text: str, started: float) -> Completed:
    return Completed(tuple(argv), code, b"", text.encode(), time.monotonic() - started)
