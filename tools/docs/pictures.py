"""Draw the pictures of README and the site with the package itself: `docs/pictures/*.svg`.

python tools/docs/pictures.py      write them
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.demo import loss_picture
from tools.replay.figures import figures
from vescale_fsdp import Rows, plan_report
from vescale_fsdp.layout.pictures import layout_svg

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
LOSSES = FOLDER.parent / "demo_losses.json"  # written by `make demo RANKS="8 6"`
BLOCK = {
    "attn.q.weight": (384, 384),
    "attn.k.weight": (384, 384),
    "attn.v.weight": (384, 384),
    "attn.o.weight": (384, 384),
    "mlp.gate.weight": (960, 384),
    "mlp.up.weight": (960, 384),
    "mlp.down.weight": (384, 960),
    "norm.weight": (384,),
}
EXPERTS = {
    "attn.qkv.weight": (5120, 2880),
    "experts.up": (32, 5760, 2880),
    "experts.down": (32, 2880, 2880),
    "norm.weight": (2880,),
}


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    block = plan_report(BLOCK, [4], Rows(32))
    padding = plan_report(EXPERTS, [8, 16, 32, 64, 128, 256, 512, 1024], Rows(32))
    name = block.groups[0].name
    return {
        "layout.svg": layout_svg(
            block.layout(name, 4), "One transformer block over 4 ranks; 32 rows stay whole"
        ),
        "padding.svg": padding.padding_picture().svg(),
        "loss.svg": loss_picture(LOSSES).svg(),
        **figures(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, svg in pictures().items():
        (FOLDER / file_name).write_text(svg)
