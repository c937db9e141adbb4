"""How much goes wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How often, per step of the world, something goes wrong.

    Attributes:
        crash: a process is killed.
        sleep: a process stops for up to `longest_sleep_s`, and wakes up as if nothing had been.
        lose: a call, or its reply, is lost together with the connection.
        late: a call that was lost, or whose process was killed, arrives all the same, up to
            `longest_delay_s` later, as from a buffer of the network.
        stall: the call of a script takes up to `longest_delay_s` to arrive; whoever made it waits.
        repeat: a call is carried out twice, as when a client sends it again.
        jump: the clock of the store is set forward or back.
        restart: every connection is lost, and the store forgets the scripts.
        fill: the store is full for a while.
        cut: the power fails, and the store comes back without its last moments, unless it syncs
            before it answers.
        rot: payload that is planned is damaged on the disk.
    """

    crash: float = 0.0
    sleep: float = 0.0
    lose: float = 0.0
    late: float = 0.0
    stall: float = 0.0
    repeat: float = 0.0
    jump: float = 0.0
    restart: float = 0.0
    fill: float = 0.0
    cut: float = 0.0
    rot: float = 0.0
    longest_sleep_s: float = 8.0
    longest_delay_s: float = 4.0
    longest_unsynced_s: float = 2.5


CALM = Weather()
