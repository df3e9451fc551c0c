import errno
import os
import signal
import stat
import threading
import time

import pytest

from vlcache_hf.store import temporary
from vlcache_hf.store.paths import private_dirs
from vlcache_hf.store.temporary import reclaim_orphans, temporary_bytes, temporary_file

fcntl = pytest.importorskip("fcntl", reason="needs locks of files")

HOUR = 3600


@pytest.fixture
def root(tmp_path):
    private_dirs(tmp_path, "tmp")
    return tmp_path


def orphan(root, name="1-dead.tmp", size=10, age=0.0):
    path = root / "tmp" / name
    path.write_bytes(b"x" * size)
    set_age(path, age)
    return path


def set_age(path, age):
    then = time.time() - age
    os.utime(path, (then, then), follow_symlinks=False)


def names(root):
    return sorted(os.listdir(root / "tmp"))


def test_the_file_is_private_and_gone_afterwards(root):
    before = os.umask(0)
    try:
        with temporary_file(root) as file:
            with file.open() as writer:
                writer.write(b"hello")
            assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
            assert file.path.read_bytes() == b"hello"
            assert temporary_bytes(root) == 5
    finally:
        os.umask(before)
    assert names(root) == []


def test_what_was_published_stays_and_no_descriptor_does(root):
    descriptors = set(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else None
    with temporary_file(root) as file:
        with file.open() as writer:
            writer.write(b"hello")
        os.replace(file.path, root / "entry")
    with pytest.raises(KeyboardInterrupt), temporary_file(root) as file, file.open():
        raise KeyboardInterrupt
    assert (root / "entry").read_bytes() == b"hello" and names(root) == []
    assert temporary._LOCKED == {}
    if descriptors is not None:
        assert set(os.listdir("/dev/fd")) == descriptors


def test_an_error_that_only_closing_tells_is_raised(root, monkeypatch):
    real = os.close

    def quota(descriptor):
        real(descriptor)
        raise OSError(errno.EDQUOT, "quota exceeded")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="quota"), temporary_file(root) as file:
        patch.setattr(os, "close", quota)
        with file.open() as writer:
            writer.write(b"hello")
    assert names(root) == []


@pytest.mark.parametrize("age, goes", [(0, False), (50, False), (70, True), (2 * HOUR, True), (-HOUR, True)])
def test_a_file_without_a_lock_goes_after_a_minute(root, age, goes):
    orphan(root, age=age)
    assert reclaim_orphans(root) == (0 if goes else 10)
    assert names(root) == ([] if goes else ["1-dead.tmp"])


@pytest.mark.parametrize("written", [False, True])
def test_a_locked_file_is_left_alone_whatever_its_age(root, written):
    with temporary_file(root) as file:
        if written:
            with file.open() as writer:
                writer.write(b"hello")
        set_age(file.path, 48 * HOUR)
        assert reclaim_orphans(root) == 0
        assert file.path.exists()


def test_a_file_whose_writer_may_be_about_to_lock_it_is_not_locked(root, monkeypatch):
    orphan(root, "new", size=0)
    orphan(root, "old", size=0, age=120)
    locked, real = [], fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *args: (locked.append(args), real(*args)))
    assert reclaim_orphans(root) == 0
    assert (names(root), len(locked)) == (["new"], 1)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_where_there_are_no_locks_age_decides(root, monkeypatch, code):
    def unsupported(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    orphan(root, "old", age=2 * HOUR)
    orphan(root, "silent", size=20, age=HOUR / 2)
    with temporary_file(root) as file:
        with file.open() as writer:
            writer.write(b"hello")
        assert reclaim_orphans(root) == 20  # nobody has written to it for long: it may be one
        assert names(root) == sorted(["silent", file.path.name])


def test_without_fcntl_age_decides_and_the_file_is_closed_before_it_is_moved(root, monkeypatch):
    monkeypatch.setattr(temporary, "fcntl", None)
    orphan(root, "old", age=2 * HOUR)
    orphan(root, "young", age=HOUR / 2)
    with temporary_file(root) as file:
        with file.open() as writer:
            writer.write(b"hello")
        assert writer.closed
        with pytest.raises(OSError):
            os.fstat(file._descriptor)
        assert reclaim_orphans(root) == 10
        assert names(root) == sorted(["young", file.path.name])
    assert names(root) == ["young"]


def test_what_is_no_regular_file_is_never_opened(root, monkeypatch):
    precious = root / "precious"
    precious.write_bytes(b"x")
    os.symlink(precious, root / "tmp" / "link")
    os.mkfifo(root / "tmp" / "pipe")
    (root / "tmp" / "grave.index").mkdir()
    (root / "tmp" / "grave.index" / "cache.db").write_bytes(b"x")
    opened = []
    monkeypatch.setattr(os, "open", lambda *args, **kwargs: opened.append(args))
    for age, left in ((HOUR / 2, ["grave.index", "link", "pipe"]), (2 * HOUR, [])):
        for path in (root / "tmp").iterdir():
            set_age(path, age)
        with monkeypatch.context() as patch:
            patch.setattr(temporary.shutil, "rmtree", remove_one)
            reclaim_orphans(root)
        assert names(root) == left
    assert opened == [] and precious.exists()


def remove_one(path, ignore_errors):
    os.unlink(os.path.join(path, "cache.db"))
    os.rmdir(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_takes_the_place_of_a_file_is_not_removed_for_it(root, monkeypatch, kind):
    path, precious = orphan(root, age=120), root / "precious"
    precious.write_bytes(b"x")
    real = os.open

    def swapped(name, *args, **kwargs):
        os.unlink(name)
        if kind == "link":
            os.symlink(precious, name)
        elif kind == "pipe":
            os.mkfifo(name)
        else:
            orphan(root, size=3)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapped)
    reclaim_orphans(root)
    assert names(root) == [path.name] and precious.read_bytes() == b"x"


def test_what_may_not_be_opened_waits_for_an_hour(root, monkeypatch):
    path = orphan(root, age=120)

    def denied(*args, **kwargs):
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(os, "open", denied)
    assert reclaim_orphans(root) == 10
    set_age(path, 2 * HOUR)
    assert reclaim_orphans(root) == 0
    assert names(root) == []


def test_two_may_reclaim_at_once(root):
    for number in range(50):
        orphan(root, f"{number}.tmp", age=120)
    failed = []

    def work():
        try:
            reclaim_orphans(root)
        except Exception as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, names(root)) == ([], [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_a_killed_writer_does_not_keep_its_file_locked(root):
    out, stop = os.pipe(), os.pipe()
    writer = os.fork()
    if writer == 0:
        signal.alarm(60)
        with temporary_file(root) as file, file.open() as target:
            target.write(b"x" * 100_000)
            child = os.fork()
            if child == 0:  # lives on
                os.write(out[1], b"child\n")
                os.close(stop[1])
                os.read(stop[0], 1)
                os._exit(0)
            os.read(stop[0], 1)
    os.close(stop[0])
    assert os.read(out[0], 10) == b"child\n"
    (path,) = (root / "tmp").iterdir()
    set_age(path, 120)
    assert reclaim_orphans(root) == 0 and path.exists()  # its writer lives, and holds the lock
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    set_age(path, 120)
    assert reclaim_orphans(root) == 0
    assert names(root) == []
    os.close(stop[1])  # the child ends
    for descriptor in out:
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_write_into_the_file_of_its_parent(root):
    with temporary_file(root) as file:
        with file.open() as writer:
            writer.write(b"parent")
            child = os.fork()
            if child == 0:
                writer.write(b"child")
                writer.flush()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert file.path.read_bytes() == b"parent"
