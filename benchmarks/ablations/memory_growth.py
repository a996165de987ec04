"""What a process takes whose freed memory is kept, over a long training (`keep_memory`).

A small GPT trains in bfloat16 with texts of one length or of any, with glibc's defaults or with
freed memory kept; each case in several processes. After the last step it is evaluated once at
another batch, and trained some more. Printed and written are the peaks of resident memory so far.
A trial sees the first steps only.

    python -m benchmarks.ablations.memory_growth --steps 200
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS
from benchmarks.provenance import machine

#: Steps after which the peak is told first: about what a trial takes.
FEW_STEPS = 10
EVALUATED_TIMES, STEPS_AFTERWARDS = 4, 10
ONE_LENGTH, ANY_LENGTH = "one", "any"


def peaks(lengths: str, keep: bool, batch_size: int, steps: int, seed: int) -> dict[str, int]:
    """Train in this process, which should be a new one; bytes by when they were the peak."""
    import torch

    from autoprec.backends.shared.process_memory import keep_freed_memory, peak_resident_bytes
    from benchmarks.tasks import gpt

    class AnyLength(gpt.Decoder):
        """The task's decoder for texts that may be shorter than its positions."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            length = tokens.shape[1]
            mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
            hidden = self.tokens(tokens) + self.positions[:length]
            hidden = self.blocks(hidden, mask=mask, is_causal=True)
            out: torch.Tensor = self.head(self.norm(hidden))
            return out

    if keep and not keep_freed_memory():
        raise SystemExit("freed memory cannot be kept here: glibc's malloc is needed")
    torch.manual_seed(seed)
    model, batches = AnyLength(), gpt.build_data(batch_size)
    optimizer = torch.optim.AdamW(model.parameters())
    draw = torch.Generator().manual_seed(seed)

    def train(count: int) -> int:
        for _ in range(count):
            shortest = gpt.LENGTH if lengths == ONE_LENGTH else gpt.LENGTH // 4
            length = int(torch.randint(shortest, gpt.LENGTH + 1, (), generator=draw))
            inputs, targets = (part[:, :length] for part in next(batches))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = gpt.loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return peak_resident_bytes()

    found = {"few_steps": train(FEW_STEPS), "all_steps": train(steps - FEW_STEPS)}
    with torch.no_grad():
        inputs, targets = next(gpt.build_data(EVALUATED_TIMES * batch_size))
        gpt.loss_fn(model(inputs), targets)
    return {**found, "after_evaluation": train(STEPS_AFTERWARDS)}


def in_new_process(function: Callable[..., dict[str, int]], *arguments: Any) -> dict[str, int]:
    """A function's result in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def line(row: dict[str, Any]) -> str:
    """A row on a terminal."""
    told = "  ".join(f"{row[name] / 2**30:5.2f} GiB" for name in row["times"])
    kept = "kept" if row["kept"] else "not kept"
    return f"{row['lengths']:4s} length  {kept:8s}  process {row['seed']}: {told}"


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2, help="of each case")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= FEW_STEPS:
        parser.error(f"--steps {arguments.steps}: more than {FEW_STEPS} are needed")
    head = machine()
    output = arguments.output or RESULTS / f"memory_growth-{head['date']}-{head['family']}.json"
    asked = {"batch": arguments.batch, "steps": arguments.steps, "few_steps": FEW_STEPS}
    print(f"peaks after {FEW_STEPS} steps, after {arguments.steps}, and after an evaluation")
    rows: list[dict[str, Any]] = []
    for lengths in (ONE_LENGTH, ANY_LENGTH):
        for keep in (False, True):
            for seed in range(arguments.processes):
                case = (lengths, keep, arguments.batch, arguments.steps, seed)
                found = in_new_process(peaks, *case)
                rows.append({"lengths": lengths, "kept": keep, "seed": seed, **found})
                print(line({**rows[-1], "times": list(found)}), flush=True)
                text = json.dumps({**head, **asked, "rows": rows}, indent=1)
                write_text(output, text + "\n")


if __name__ == "__main__":
    main()
