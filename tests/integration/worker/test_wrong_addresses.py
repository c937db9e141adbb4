"""An address of another form is one sentence with the expected form, at once."""

from __future__ import annotations

import pytest

from turnstream.errors import InvalidConfigError
from turnstream.worker import BatchStream
from turnstream.worker._replicas import addresses_of

WRONG = {
    "redis://localhost:7379": "is the address of a store, not of a batcher: write HOST:PORT",
    "rediss://localhost": "is the address of a store, not of a batcher: write HOST:PORT",
    "localhost": "has no port: write HOST:PORT, such as 127.0.0.1:7600",
    "localhost:": "has no port: write HOST:PORT",
    "http://localhost:7600": "has no port: write HOST:PORT",
    "": "has an empty address: write HOST:PORT",
    "one:7600,two": "has no port: write HOST:PORT",
}


@pytest.mark.parametrize("target", WRONG)
def test_wrong_batcher_address_names_the_expected_form(target: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        BatchStream(target, "maze")

    assert str(caught.value).startswith("target: ")
    assert WRONG[target] in str(caught.value)


@pytest.mark.parametrize(
    "target", ["a:1", "[::1]:7600", "unix:/run/b.sock", "dns:///b:1", "ipv4:1.2.3.4:5"]
)
def test_batcher_addresses_of_grpc_are_accepted(target: str) -> None:
    assert addresses_of(target) == (target,)
