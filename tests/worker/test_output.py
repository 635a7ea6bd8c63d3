"""Output that nobody reads must not hold up the agent."""

import os
import threading

from worker.output import Printer, QueuedStream


def test_text_arrives_in_order_and_whole() -> None:
    reader, writer = os.pipe()
    printer = Printer()
    stream = QueuedStream(printer, writer)
    for number in range(300):
        print(f"line {number} ☃", file=stream)
    printer.close()
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as told:
        assert told.read() == "".join(f"line {number} ☃\n" for number in range(300))


def test_a_reader_that_stands_still_costs_output_not_time() -> None:
    reader, writer = os.pipe()
    printer = Printer(capacity=8)
    done = threading.Event()

    def flood() -> None:
        for _ in range(100):
            printer.put(writer, "x" * 65536 + "\n")
        done.set()

    threading.Thread(target=flood, daemon=True).start()
    assert done.wait(10), "a full pipe held up the writer"
    seen = bytearray()
    draining = threading.Thread(target=lambda: seen.extend(_read_all(reader)))
    draining.start()
    while printer._dropped:
        printer.put(writer, "back\n")
    printer.close(10)
    os.close(writer)
    draining.join(10)
    os.close(reader)
    text = seen.decode()
    assert "pieces of output were dropped\n" in text
    assert text.endswith("back\n")


def test_a_reader_that_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    printer = Printer()
    printer.put(writer, "to nobody\n")
    printer.close()
    assert not printer._thread.is_alive()
    os.close(writer)


def _read_all(descriptor: int) -> bytes:
    data = b""
    while piece := os.read(descriptor, 1 << 16):
        data += piece
    return data
