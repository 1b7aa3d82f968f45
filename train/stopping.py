"""Ctrl-C during a training: the step under way is finished and saved."""

from collections.abc import Iterator
import contextlib
import signal
import sys
import threading

__all__ = ["stop_asked"]


@contextlib.contextmanager
def stop_asked() -> Iterator[threading.Event]:
  """Yields an event that the first Ctrl-C sets; the second works as usual."""
  asked = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield asked  # signals are the main thread's
    return
  usual = signal.getsignal(signal.SIGINT) or signal.default_int_handler

  def hear(*_):
    asked.set()
    signal.signal(signal.SIGINT, usual)
    print("\nstopping after this step", file=sys.stderr)

  signal.signal(signal.SIGINT, hear)
  try:
    yield asked
  finally:
    signal.signal(signal.SIGINT, usual)
