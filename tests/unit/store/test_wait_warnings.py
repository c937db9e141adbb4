from __future__ import annotations

from turnstream.store.waits.wait_warnings import WaitWarnings


def test_warning_is_due_despite_rounding_of_the_clock() -> None:
    # A wait of 4.999999999999999 s was not due, and its timer of 9e-16 s was set again and again.
    began_s = 4.953396763492209
    warnings = WaitWarnings()
    pause_s = warnings.pause_s(0.0)
    assert pause_s is not None

    waited_s = (began_s + pause_s - 1e-15) - began_s

    assert waited_s < 5.0
    assert warnings.is_due(waited_s)
