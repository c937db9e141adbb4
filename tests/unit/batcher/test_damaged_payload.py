from __future__ import annotations

from turnstream.types import TrajectoryKey
from turnstream_server.batcher.assembly.payload import Damage, DamagedPayloadError


def test_damage_is_reported_with_decoded_names() -> None:
    damages = (Damage(TrajectoryKey("a/b#1", 2), "a turn is missing"),)

    assert str(DamagedPayloadError(damages)) == "damaged payload of a/b#1/2/0: a turn is missing"
