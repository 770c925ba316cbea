"""What `make demo` runs: the video recipe on the embedded model, over two processes.

    python recipes/demo.py [PROMPT]

Writes a video and a contact sheet of its frames into `outputs/`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "a red circle moves right on a black background"


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("prompt", nargs="*", help=f"default: {PROMPT}")
    prompt = " ".join(flags.parse_args().prompt) or PROMPT
    from tiny_world import FPS, HEIGHT, NUM_FRAMES, WIDTH  # and torch, which takes seconds to import

    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        str(ROOT / "recipes" / "text_to_video.py"),
        *("--model", str(ROOT / "recipes" / "tiny_wan")),
        *("--prompt", prompt),
        *("--height", str(HEIGHT), "--width", str(WIDTH), "--num-frames", str(NUM_FRAMES), "--fps", str(FPS)),
        *("--num-inference-steps", "25"),
        *("--pipeline-parallel-size", "2"),
        *("--output", str(ROOT / "outputs" / "demo.mp4")),
        "--contact-sheet",
    ]
    return subprocess.run(command, cwd=ROOT, timeout=1800).returncode


if __name__ == "__main__":
    raise SystemExit(main())
