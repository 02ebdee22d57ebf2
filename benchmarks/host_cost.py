"""Host cost of a step: what the engine process spends beside the model.

The real engine loop, with its sockets, around an executor that takes no time. Counted is the processor time of the
engine's thread a step: taking commands, scheduling, token bookkeeping, and handing the outputs to the front, which is
another process here as in a server.

    python benchmarks/host_cost.py --json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import msgspec
import zmq

from lowlat.bench import results, stats
from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import ScriptedExecutor
from lowlat.engine.messages import Shutdown, Submit, encode
from lowlat.engine.process import EngineLoop
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.scheduler import Scheduler

STEPS = 2000
PROMPT_TOKENS = 128
PAGE_SIZE = 16

FRONT = """
import sys, zmq
from lowlat.engine.messages import Outputs, decode_event
socket = zmq.Context().socket(zmq.PULL)
socket.set_hwm(0)
socket.bind(sys.argv[1])
print("bound", flush=True)
tokens = 0
while tokens < int(sys.argv[2]):
    event = decode_event(socket.recv())
    if isinstance(event, Outputs):
        tokens += sum(len(item.token_ids) for item in event.items)
print(tokens, flush=True)
"""


def microseconds_a_step(batch: int) -> float:
    """Processor time of the engine's process a step with `batch` requests that decode `STEPS` tokens each."""
    pages = batch * (PROMPT_TOKENS + STEPS + PAGE_SIZE) // PAGE_SIZE + batch
    limits = PlanLimits(max_batch=batch, max_rows=512 + batch, max_pages=pages)
    scheduler = Scheduler(PrefixCache(pages, PAGE_SIZE), limits, eos_ids=frozenset({2}), chunk_tokens=512, seed=0)
    core = EngineCore(scheduler, ScriptedExecutor(lambda slot, position: 3 + (slot + position) % 100), run_ahead=1)
    with tempfile.TemporaryDirectory() as folder:
        front = subprocess.Popen(
            [sys.executable, "-c", FRONT, f"ipc://{folder}/events", str(batch * STEPS)], stdout=subprocess.PIPE
        )
        assert front.stdout is not None
        front.stdout.readline()
        context = zmq.Context()
        commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        sender = context.socket(zmq.PUSH)
        for socket in (commands, events, sender):
            socket.set_hwm(0)
        commands.bind("inproc://commands")
        sender.connect("inproc://commands")
        events.connect(f"ipc://{folder}/events")
        for number in range(batch):
            sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
            prompt = [(number * 7 + k) % 500 + 3 for k in range(PROMPT_TOKENS)]
            sender.send(encode(Submit(GenerateRequest(id=f"r{number}", prompt_ids=prompt, sampling=sampling))))
        core_turn = core.turn

        def turn(timeout: float | None = None) -> list:
            outputs = core_turn(timeout)
            if not core.has_work:
                sender.send(encode(Shutdown()))
            return outputs

        core.turn = turn  # type: ignore[method-assign]
        begin = time.thread_time()
        EngineLoop(core, commands, events).run()
        spent = time.thread_time() - begin
        received = int(front.stdout.readline())
        front.wait(timeout=30)
        context.destroy(linger=0)
    assert received == batch * STEPS, f"the front received {received} tokens"
    return spent / scheduler.stats.step * 1e6


def main() -> None:
    """Measure batch 1 and 8 in alternation and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it under benchmarks/results")
    arguments = parser.parse_args()
    if arguments.save:
        results.check_folder()
    arms = {f"batch {batch}": (lambda batch=batch: microseconds_a_step(batch)) for batch in (1, 8)}
    measured = stats.alternate(arms, arguments.rounds)
    rows = [
        results.row_from_samples(
            measured.samples(f"batch {batch}"),
            workload="decode with a scripted executor",
            arm="general",
            metric="host_us_per_step",
            concurrency=batch,
            rows=batch,
            note=f"limit {limit} us",
        )
        for batch, limit in ((1, 150), (8, 400))
    ]
    result = results.new_result("host-cost", simulated=results.Simulated(weights=True, acceptance=False), gpus=0)
    result.rows.extend(rows)
    if arguments.save:
        print(results.save(result), file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(result).decode())
    else:
        for row in rows:
            print(f"batch {row.concurrency}: {row.median:.1f} us a step ({row.low:.1f} to {row.high:.1f}); {row.note}")


if __name__ == "__main__":
    main()
