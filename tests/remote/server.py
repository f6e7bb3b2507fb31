"""A local server that answers like S3, so that no test sends requests outside this machine."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "a-bucket"

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
"""Credentials that allow requests to be signed and keep Amazon's library from searching for more.
"""

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def fake_s3(bucket: str = BUCKET) -> Iterator[str]:
    """Runs a server with an empty bucket in a separate process; yields its URL."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        host, port = server.stdout.readline().split()
        url = f"http://{host}:{port}"
        _make(url, bucket)
        try:
            yield url
        finally:
            server.kill()


def _make(url: str, bucket: str) -> None:
    region = "<LocationConstraint>eu-central-1</LocationConstraint>"
    content = f"<CreateBucketConfiguration>{region}</CreateBucketConfiguration>"
    signed = "AWS4-HMAC-SHA256 Credential=nobody/20260101/eu-central-1/s3/aws4_request"
    urllib.request.urlopen(
        urllib.request.Request(
            f"{url}/{bucket}",
            data=content.encode(),
            method="PUT",
            headers={"Authorization": signed, "Content-Type": "application/xml"},
        )
    ).close()
