"""Ctrl-C during a training of one process: its step is finished and saved."""

from collections.abc import Iterator
import contextlib
import os
import signal
import threading

__all__ = ["stop_asked"]


@contextlib.contextmanager
def stop_asked() -> Iterator[threading.Event]:
  """Yields an event that the first Ctrl-C sets; the second works as usual."""
  asked = threading.Event()
  if threading.current_thread() is not threading.main_thread():
    yield asked  # signals are the main thread's
    return
  usual = signal.getsignal(signal.SIGINT)
  if usual in (signal.SIG_IGN, None):  # of a job that shall not hear it
    yield asked
    return

  def hear(*_):
    asked.set()
    signal.signal(signal.SIGINT, usual)
    os.write(2, b"\nstopping after this step\n")  # safe inside another write

  signal.signal(signal.SIGINT, hear)
  try:
    yield asked
  finally:
    signal.signal(signal.SIGINT, usual)
