"""``python -m benchmarks.fuzzing.guided TARGET INPUTS SEED DIRECTORY``: one target under atheris, in its own process.

Every branch of ``wire``, ``worker`` and ``backend`` counts; a finding is written down and does not end the campaign.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["wire", "worker", "backend"]):
    from benchmarks.fuzzing.decoding import attempt
    from benchmarks.fuzzing.findings import Findings
    from benchmarks.fuzzing.laws import MAX_INPUT
    from benchmarks.fuzzing.targets import TARGETS


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    name, inputs, seed, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    target, findings = TARGETS[name], Findings()
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed{number}").write_bytes(data)

    def one(data: bytes) -> None:
        attempt(target, data, findings)
        if findings.inputs >= inputs or findings.inputs % 20_000 == 0:
            (directory / "findings.json").write_text(json.dumps(findings.as_json()))

    def other(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        made = atheris.Mutate(data, most) if random.random() < 0.3 else target.mutate(data, random)
        return bytes(made)[:most]

    options = [f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={MAX_INPUT}", "-rss_limit_mb=3000", "-len_control=0"]
    options += ["-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={directory}/", "-timeout=20"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=other)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
