"""Do processes that share a GPU crash in CUDA graphs? python -m tests.graph_stress --seconds 200 branches one eager

Each lane starts a process after the other, of one variant: ResNet-50-D's passes as a graph, and Muon's step. Prints how
many starts of each variant ended well, and the last lines of those that did not. `branches` is what train.py does,
`plain` is torch and timm alone.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

VARIANTS = ("branches", "one", "eager", "no-priority", "fp16", "plain")  # the last has no graph


def train(variant: str, steps: int, seed: int) -> None:
    """Train on random images; the host is as far ahead of the device as in train.py."""
    import timm
    import torch
    from timm.optim import create_optimizer_v2
    from torch import nn
    from torch.amp.grad_scaler import GradScaler

    from utils.network import gradients
    from utils.training.optimization import optimizer_graph

    device = torch.device("cuda", 0)
    torch.manual_seed(seed)
    if variant == "no-priority":
        modules: tuple[Any, ...] = (gradients, optimizer_graph)
        for module in modules:
            module.capture_stream = torch.cuda.Stream
    if variant == "one":
        optimizer_graph.NUM_BRANCHES = 1
    model = timm.create_model("resnet50d", num_classes=10).to(device).to(memory_format=torch.channels_last).train()
    optimizer = create_optimizer_v2(model, opt="muon", lr=0.006, weight_decay=0.05, momentum=0.9)
    is_fp16 = variant == "fp16"
    scaler, dtype = GradScaler("cuda", enabled=is_fp16), torch.float16 if is_fp16 else torch.bfloat16
    passes: Any = gradients.ForwardBackward(model, nn.CrossEntropyLoss(label_smoothing=0.1), scaler, dtype, 1)
    if variant != "plain":
        passes = gradients.GraphedForwardBackward(passes, gradients.capture_stream(device))
    update: Any = optimizer.step
    if variant in ("branches", "one", "no-priority"):
        update = optimizer_graph.GraphedOptimizerStep(optimizer, device)
    pool = torch.randint(0, 255, (512, 3, 128, 128), dtype=torch.uint8, device=device)
    pool = pool.contiguous(memory_format=torch.channels_last)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for step in range(steps):
        chosen = torch.randint(512, (64,)).pin_memory().to(device, non_blocking=True)
        total += passes((pool[chosen] / 255).to(dtype), chosen % 10, 0)
        if is_fp16:
            scaler.step(optimizer)
            scaler.update()
        else:
            update()
        if step % 50 == 49:
            print(f"step {step + 1}, loss {float(total) / (step + 1):.3f}", flush=True)
    print("done", flush=True)
    os._exit(0)


def lane(variant: str, number: int, steps: int, deadline: float) -> list[tuple[str, int, str]]:
    """Variant, status and last lines of each start of a lane."""
    found: list[tuple[str, int, str]] = []
    while time.monotonic() < deadline:
        words = [sys.executable, "-X", "faulthandler", "-m", "tests.graph_stress", variant, "--once"]
        words += ["--steps", str(steps), "--seed", str(100 * number + len(found))]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        found.append((variant, done.returncode, (done.stdout + done.stderr)[-2000:]))
    return found


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("tests.graph_stress", description="CUDA graphs of processes that share a GPU.")
    parser.add_argument("variants", nargs="+", choices=VARIANTS, help="one a lane, in turn")
    for name, default in (("lanes", 9), ("seconds", 200), ("steps", 110), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.once:
        train(given.variants[0], given.steps, given.seed)
    variants = [given.variants[number % len(given.variants)] for number in range(given.lanes)]
    deadline = time.monotonic() + given.seconds
    with ThreadPoolExecutor(given.lanes) as pool:
        lanes = [pool.submit(lane, variant, number, given.steps, deadline) for number, variant in enumerate(variants)]
        found = [start for each in lanes for start in each.result()]
    for variant, status, text in found:
        if status:
            print(f"{variant}: status {status}\n{text}\n")
    print("| variant | starts | crashed |\n|---|---|---|")
    starts, crashed = Counter(start[0] for start in found), Counter(start[0] for start in found if start[1])
    for variant in dict.fromkeys(variants):
        print(f"| {variant} | {starts[variant]} | {crashed[variant]} |")


if __name__ == "__main__":
    main(sys.argv[1:])
