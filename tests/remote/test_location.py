"""What names a location: a path or a URL, including a URL that was mistaken for a path."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
import tensorstore as ts

from comgra_decl.errors import MissingPackageError, StoreError
from comgra_decl.store import remote
from comgra_decl.store.location import Remote, joined, location
from comgra_decl.store.remote import base_spec, message


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("s3://bucket/runs/train", Remote("s3", "bucket", "runs/train")),
        ("s3://bucket", Remote("s3", "bucket")),
        ("s3://bucket/", Remote("s3", "bucket")),
        ("gs://bucket//runs/./train/", Remote("gs", "bucket", "runs/train")),
        (Path("s3://bucket/runs"), Remote("s3", "bucket", "runs")),
        (Path("gs://bucket"), Remote("gs", "bucket")),
        (Remote("s3", "b", "c"), Remote("s3", "b", "c")),
        ("runs/s3://x", Path("runs/s3:/x")),
        ("s3/bucket", Path("s3/bucket")),
        ("C:/runs", Path("C:/runs")),
    ],
)
def test_a_place_is_what_it_is_called(said: str | Path | Remote, meant: object) -> None:
    assert location(said) == meant


@pytest.mark.parametrize("said", ["http://host/runs", "s3://", "file:///runs", "s3:///runs"])
def test_other_urls_are_refused_with_what_would_be_right(said: str) -> None:
    with pytest.raises(
        StoreError, match=r"not a valid location for runs; choose a folder, s3://BUCKET/PREFIX"
    ):
        location(said)


def test_nothing_leads_out_of_a_place() -> None:
    with pytest.raises(StoreError, match=r"'\.\.'"):
        location("s3://bucket/runs/../../other")
    with pytest.raises(StoreError, match=r"'\.\.'"):
        Remote("s3", "bucket", "runs") / "../other"


def test_a_place_in_a_bucket_is_used_like_a_path() -> None:
    run = Remote("s3", "bucket") / "runs" / "train" / PurePosixPath("first")
    assert (run.name, run.parent.name, str(run)) == (
        "first",
        "train",
        "s3://bucket/runs/train/first",
    )
    assert run.parent.parent.parent == Remote("s3", "bucket")
    assert run.absolute() is run
    assert run.relative_to(Remote("s3", "bucket", "runs")) == PurePosixPath("train/first")
    assert run.relative_to(Remote("s3", "bucket")) == PurePosixPath("runs/train/first")
    for other in (Remote("s3", "another"), Remote("s3", "bucket", "runs/tra")):
        with pytest.raises(ValueError, match="not"):
            run.relative_to(other)
    assert sorted([run, run.parent]) == [run.parent, run]


def test_relative_places_lie_where_the_program_was_started(tmp_path: Path) -> None:
    assert joined(tmp_path, "runs") == tmp_path / "runs"
    assert joined(tmp_path, "/elsewhere") == Path("/elsewhere")
    assert joined(tmp_path, "s3://bucket/runs") == Remote("s3", "bucket", "runs")


def test_what_tensorstore_is_told_is_valid_and_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3, gs = base_spec(Remote("s3", "bucket", "a/b")), base_spec(Remote("gs", "bucket", "a/b"))
    assert s3 == {
        "driver": "s3",
        "bucket": "bucket",
        "path": "a/b/",
        "endpoint": "http://127.0.0.1:9",
        "aws_region": "eu-central-1",
    }
    assert gs == {"driver": "gcs", "bucket": "bucket", "path": "a/b/"}
    assert base_spec(Path("/a/b")) == {"driver": "file", "path": "/a/b/"}
    assert base_spec(Remote("s3", "bucket"))["path"] == ""
    assert ts.KvStore.Spec(gs).url == "gs://bucket/a/b/"
    for spec in (s3, gs):
        assert ts.KvStore.Spec({"driver": "ocdbt", "base": spec}).to_json()["base"] == spec
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:8")
    monkeypatch.delenv("AWS_REGION")
    assert base_spec(Remote("s3", "bucket"))["endpoint"] == "http://127.0.0.1:8"
    assert base_spec(Remote("s3", "bucket"))["aws_region"] == "us-east-1"


def test_a_build_that_lacks_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "DRIVERS", {"s3": "s4"})
    with pytest.raises(
        MissingPackageError, match=r"lacks the 's4' driver.*pip install tensorstore"
    ):
        base_spec(Remote("s3", "bucket"))


@pytest.mark.parametrize(("scheme", "way"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLIC")])
def test_who_is_not_let_in_reads_where_credentials_come_from(scheme: str, way: str) -> None:
    error = ValueError("PERMISSION_DENIED: no [source locations='a.cc:1']")
    said = message(error, Remote(scheme, "bucket"))
    assert said.startswith("PERMISSION_DENIED: no (credentials are read from ")
    assert way in said
    assert message(error, Path("/a")) == "PERMISSION_DENIED: no"
