"""The name of a key, what a key file may contain, and which keys hold while the file is wrong."""

import hashlib
import logging
import os
import time
from pathlib import Path

import pytest

from deployments.endpoint import api_keys
from deployments.endpoint.api_keys import ApiKeys, key_line, new_key, parse_keys


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 10.0  # each question comes after the time of the next look at the file
        return self.now_s


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_only_a_key_whose_hash_is_in_the_file_is_accepted(file: Path) -> None:
    first, second = new_key(), new_key()
    file.write_text(f"# who may ask\n\n{key_line('a', first)}\n{key_line('b', second)}\n")
    keys = ApiKeys(file)
    assert first not in file.read_text()
    assert (keys.name_of(f"Bearer {first}"), keys.name_of(f"bearer  {second} ")) == ("a", "b")
    digest = hashlib.sha256(first.encode()).hexdigest()
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {first}",
        first,
        f"Bearer {digest}",
        f"Bearer {first}x",
        "Bearer \udcff",
    ):
        assert keys.name_of(wrong) is None


def test_every_key_is_compared_in_constant_time_whichever_it_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_key() for _ in range(3)]
    file.write_text("\n".join(key_line(f"k{number}", key) for number, key in enumerate(made)))
    keys, compared, compare = ApiKeys(file), list[bytes](), api_keys.hmac.compare_digest

    def count(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return compare(known, presented)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", count)
    for key, name in ((made[0], "k0"), (made[2], "k2"), ("tk-other", None)):
        compared.clear()
        assert keys.name_of(f"Bearer {key}") == name
        assert len({*compared}) == len(compared) == 3


def test_a_change_holds_at_once_and_a_wrong_file_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = new_key(), new_key()
    file.write_text(key_line("a", first) + "\n")
    keys = ApiKeys(file, Clock())
    file.write_text(key_line("bb", second) + "\n")
    assert keys.name_of(f"Bearer {first}") is None
    assert keys.name_of(f"Bearer {second}") == "bb"
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        file.write_text("my-secret\n")
        assert keys.name_of(f"Bearer {second}") == "bb"
        file.unlink()
        assert keys.name_of(f"Bearer {second}") == "bb"
    assert len(caplog.messages) == 2
    assert "line 1" in caplog.messages[0] and "my-secret" not in caplog.text
    file.write_text(key_line("ccc", first) + "\n")
    assert keys.name_of(f"Bearer {first}") == "ccc"


def test_between_two_looks_the_file_is_left_alone(file: Path) -> None:
    key = new_key()
    file.write_text(key_line("a", key) + "\n")
    keys = ApiKeys(file, lambda: 0.0)
    file.unlink()
    assert keys.name_of(f"Bearer {key}") == "a"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a sha256:12\n", "line 1 is not"),
        ("\na b c\n", "line 2 is not"),
        (f"{key_line('a', 'x')}\n{key_line('a', 'y')}", "line 2: this name"),
        (f"{key_line('a', 'x')}\n{key_line('b', 'x')}", "line 2: this name"),
    ],
)
def test_an_invalid_key_file_is_refused(file: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_keys(text)
    file.write_text(text)
    with pytest.raises(ValueError, match=f"api_keys_file .*{said}"):
        ApiKeys(file)


@pytest.mark.parametrize("text", ["", "# none\n"])
def test_an_endpoint_does_not_start_with_a_file_without_keys(file: Path, text: str) -> None:
    assert parse_keys(text) == {}
    file.write_text(text)
    with pytest.raises(ValueError, match="it has no key: make one"):
        ApiKeys(file)


@pytest.mark.parametrize("text", ["", "# none\n"])
def test_the_only_key_is_withdrawn_by_deleting_its_line(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key()
    file.write_text(key_line("a", key) + "\n")
    keys = ApiKeys(file, Clock())
    assert keys.name_of(f"Bearer {key}") == "a"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        assert [keys.name_of(f"Bearer {key}"), keys.name_of(f"Bearer {key}")] == [None, None]
    assert [message.partition(": ")[2] for message in caplog.messages] == ["every request is refused"]
    file.write_text(key_line("a", key) + "\n")
    assert keys.name_of(f"Bearer {key}") == "a"


def test_a_file_that_could_not_be_read_is_read_once_it_can(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = new_key(), new_key()
    file.write_text(key_line("a", first) + "\n")
    keys = ApiKeys(file, Clock())
    file.write_text(key_line("bb", second) + "\n")
    with monkeypatch.context() as broken:

        def read_bytes(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        broken.setattr(Path, "read_bytes", read_bytes)
        assert keys.name_of(f"Bearer {first}") == "a"
    assert keys.name_of(f"Bearer {second}") == "bb"


def test_a_change_of_the_file_that_keeps_its_time_and_size_is_read_too(file: Path) -> None:
    first, second = new_key(), new_key()
    file.write_text(key_line("a", first) + "\n")
    stat = file.stat()
    keys = ApiKeys(file, Clock())
    time.sleep(0.02)  # a tick of the kernel's clock
    file.write_text(key_line("a", second) + "\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (stat.st_mtime_ns, stat.st_size)
    assert keys.name_of(f"Bearer {first}") is None
    assert keys.name_of(f"Bearer {second}") == "a"


def test_limits_of_a_missing_key_are_logged_at_the_start_and_at_each_change(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(key_line("team-a", new_key()) + "\n")
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        keys = ApiKeys(file, Clock(), limited=["team-a", "Team-a"])
        keys.name_of(None)
        assert ["limits of 'Team-a'" in message for message in caplog.messages] == [True]
        file.write_text(key_line("other", new_key()) + "\n")
        keys.name_of(None)
    assert len(caplog.messages) == 3
    assert "limits of 'team-a'" in caplog.messages[2]


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        ApiKeys(file)


def test_a_name_has_no_spaces() -> None:
    with pytest.raises(ValueError, match="no name for a key"):
        key_line("team a", new_key())


def test_an_error_in_the_file_is_logged_once_for_each_change(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = new_key()
    file.write_text(key_line("a", key) + "\n")
    keys = ApiKeys(file, Clock())
    with caplog.at_level(logging.ERROR, logger="ray.serve"):
        for wrong in (b"my-secret\n", b"\xff\xfe"):
            file.write_bytes(wrong)
            assert [keys.name_of(f"Bearer {key}") for _ in range(3)] == ["a"] * 3
    assert ["line 1" in message or "no text" in message for message in caplog.messages] == [True, True]
