"""The state machine of writes: sent, acknowledged, sent again. No I/O, no clock."""
