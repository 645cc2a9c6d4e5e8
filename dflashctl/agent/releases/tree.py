"""Building a release's tree: from the archive that arrived, and from what older releases already hold.

The archive is a tar whose members are named by the sha256 of their content, so nothing in it can name a path.
Nothing is taken on trust: what is taken from elsewhere is hashed on its way into the tree, and the whole tree
once more when it stands.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Dict, Iterable, List, Optional, Set, Tuple

from .. import AgentError
from .release import (
    CHUNK_BYTES,
    FILE,
    FOLDER,
    LINK,
    PROGRAM,
    Entry,
    list_releases,
    parents,
    read_manifest,
    release_path,
    sha256_of_file,
    sha256_of_text,
)

LINK_FROM_BYTES = 8 << 20
"""From this size on, an unchanged file is hard-linked and not copied: an edit in place in one release cannot
reach another through a small file, and a model of gigabytes is not stored twice."""

COPY_FROM_BYTES = 1 << 20

Holders = Dict[str, List[Tuple[str, str]]]
"""{sha256: [(absolute path, mode)]} in older releases."""


def check_entries(files: List[Entry]) -> None:
    """Refuse a manifest that would write outside its tree or contradicts itself. Raises AgentError."""
    seen: Set[str] = set()
    for entry in files:
        path = entry["path"]
        bad = path.startswith("/") or "\0" in path or not all(path.split("/"))
        if bad or any(part in (".", "..") for part in path.split("/")):
            raise AgentError("usage", "not a path of a release: %r" % path)
        if path in seen or entry["mode"] not in (FILE, PROGRAM, LINK, FOLDER):
            raise AgentError("usage", "%r: given twice or with an unknown mode" % path)
        if entry["mode"] == LINK and sha256_of_text(entry["link"]) != entry["sha256"]:
            raise AgentError("usage", "%r: the link does not match its sha256" % path)
        seen.add(path)
    solid = {entry["path"] for entry in files if entry["mode"] != FOLDER}
    for path in seen:
        if any(parent in solid for parent in parents(path)):
            raise AgentError("usage", "%r lies below a file or link" % path)


def holders_of(code_root: str, wanted: Iterable[str]) -> Holders:
    """Where older releases claim to hold these contents. A claim, from their manifests: hash before use."""
    needed = set(wanted)
    found: Holders = {}
    for release in list_releases(code_root):
        manifest = read_manifest(code_root, release).value
        for entry in manifest["files"] if manifest else []:
            if entry["sha256"] in needed and entry["mode"] in (FILE, PROGRAM):
                path = os.path.join(release_path(code_root, release), entry["path"])
                found.setdefault(entry["sha256"], []).append((path, entry["mode"]))
    return found


def build(tree: str, files: List[Entry], archive: Optional[str], holders: Holders) -> List[str]:
    """Fill the new folder `tree` with exactly `files`; returns the sha256s that are nowhere to be had.

    Raises AgentError("verification") for an archive that does not hold what it should; OSError.
    """
    os.makedirs(tree, 0o755)
    os.chmod(tree, 0o755)
    places: Dict[str, List[Entry]] = {}
    for entry in files:
        if entry["mode"] in (FILE, PROGRAM):
            places.setdefault(entry["sha256"], []).append(entry)
        _make_parents(tree, entry["path"])
        target = os.path.join(tree, entry["path"])
        if entry["mode"] == FOLDER:
            os.makedirs(target, exist_ok=True)
        elif entry["mode"] == LINK:
            os.symlink(entry["link"], target)
    waiting = set(places)
    if archive is not None:
        waiting -= _unpack(tree, archive, places)
    missing = [sha for sha in sorted(waiting) if not _reuse(tree, places[sha], holders.get(sha, []))]
    if not missing:
        _sync(tree, files)
    return missing


def _make_parents(tree: str, path: str) -> None:
    folder = os.path.dirname(os.path.join(tree, path))
    if not os.path.isdir(folder):
        os.makedirs(folder, 0o755)


def _unpack(tree: str, archive: str, places: Dict[str, List[Entry]]) -> Set[str]:
    """Put each content of the archive in its place; returns which there were.

    A content that lies as it is in the archive is copied by the kernel, unseen: the hashes of what is then on
    disk are the caller's next step, for every file alike, and hashing twice would take as long as the
    network.
    """
    done: Set[str] = set()
    try:
        with open(archive, "rb") as raw, tarfile.open(fileobj=raw, mode="r:*") as tar:
            plain = raw if tar.fileobj is raw else None  # else it is compressed
            for member in tar:
                if not member.isreg() or member.name not in places or member.name in done:
                    raise AgentError(
                        "verification", "the archive holds %r, which nobody asked for" % member.name
                    )
                first, *others = places[member.name]
                target = os.path.join(tree, first["path"])
                if plain is not None and member.size >= COPY_FROM_BYTES and member.sparse is None:
                    _copy_range(plain, member.offset_data, member.size, target, first["mode"])
                else:
                    _copy_member(tar, member, target, first)
                for other in others:
                    copy(target, os.path.join(tree, other["path"]), other["mode"])
                done.add(member.name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = "the archive arrived damaged: %s" % error
        raise AgentError("verification", what, next="deploy again") from None
    return done


def _copy_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: str, entry: Entry) -> None:
    content = tar.extractfile(member)
    digest = _write(content, target, entry["mode"])  # type: ignore[arg-type]
    if digest != member.name:
        what = "%s arrived with sha256 %s…, not %s…" % (entry["path"], digest[:12], member.name[:12])
        raise AgentError("verification", what, next="deploy again")


def _copy_range(source: BinaryIO, offset: int, size: int, target: str, mode: str) -> None:
    """`size` bytes at `offset` into a new file. Raises EOFError when there are fewer."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while size:
            sent = os.sendfile(descriptor, source.fileno(), offset, min(size, 64 * CHUNK_BYTES))
            if sent == 0:
                raise EOFError("it ends too early")
            offset, size = offset + sent, size - sent
        os.fchmod(descriptor, 0o755 if mode == PROGRAM else 0o644)
    finally:
        os.close(descriptor)


def _reuse(tree: str, entries: List[Entry], holders: List[Tuple[str, str]]) -> bool:
    """Take a content from an older release, after hashing what is really there."""
    for path, mode in holders:
        try:
            size = os.lstat(path).st_size
            if size >= LINK_FROM_BYTES:
                if sha256_of_file(path) != entries[0]["sha256"]:
                    continue
                for entry in entries:
                    _link_or_copy(path, mode, os.path.join(tree, entry["path"]), entry["mode"])
                return True
            for entry in entries:
                if copy(path, os.path.join(tree, entry["path"]), entry["mode"]) != entry["sha256"]:
                    break
            else:
                return True
        except FileNotFoundError:
            pass
        for entry in entries:
            _remove(os.path.join(tree, entry["path"]))
    return False


def _link_or_copy(source: str, source_mode: str, target: str, mode: str) -> None:
    if source_mode == mode:  # a link shares its mode with the other release
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without hard links
            pass
    copy(source, target, mode)


def copy(source: str, target: str, mode: str) -> str:
    """To a new file; returns the sha256 of what was written."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as reader:
        return _write(reader, target, mode)


def _write(reader: BinaryIO, target: str, mode: str) -> str:
    """Write a new file, whatever the umask; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in iter(lambda: reader.read(CHUNK_BYTES), b""):
            digest.update(chunk)
            file.write(chunk)
        os.fchmod(file.fileno(), 0o755 if mode == PROGRAM else 0o644)
    return digest.hexdigest()


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sync(tree: str, files: List[Entry]) -> None:
    """A release that has its name must survive a power cut whole. Many fsyncs in flight share their journal
    commits."""
    paths = [os.path.join(tree, entry["path"]) for entry in files if entry["mode"] in (FILE, PROGRAM)]
    folders = [tree, *sorted({os.path.join(tree, up) for entry in files for up in parents(entry["path"])})]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(sync_one, paths + folders))


def sync_one(path: str) -> None:
    """What was written to a file or folder is on disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
