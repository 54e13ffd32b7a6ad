"""Published algorithms in the formats that others describe collectives in, written after those formats."""

# One step of MSCCL's XML: type, source and destination ("s3": scratch, chunk 3), who it waits for ("2.1":
# step 1 of thread block 2; or nobody).
Step = tuple[str, str, str, str]


def msccl(name: str, chunks: int, gpus: list[list[tuple[int, int, list[Step]]]]) -> str:
    """XML of thread blocks (send to, receive from, steps); every step may be waited for."""
    lines = [
        f'<algo name="{name}" coll="allreduce" inplace="1" ngpus="{len(gpus)}" nchunksperloop="{chunks}">'
    ]
    for rank, blocks in enumerate(gpus):
        lines.append(f'<gpu id="{rank}" i_chunks="{chunks}" o_chunks="0" s_chunks="{chunks}">')
        for block, (send, receive, steps) in enumerate(blocks):
            lines.append(f'<tb id="{block}" send="{send}" recv="{receive}" chan="0">')
            for number, (kind, source, target, waits) in enumerate(steps):
                waited, at = waits.split(".") if waits else ("-1", "-1")
                lines.append(
                    f'<step s="{number}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" '
                    f'dstbuf="{target[0]}" dstoff="{target[1:]}" '
                    f'cnt="1" depid="{waited}" deps="{at}" hasdep="1"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def msccl_ring(size: int) -> str:
    """Reduce-scatter and all-gather around a ring, one thread block a GPU."""
    gpus = []
    for rank in range(size):
        kinds = ["s", *["rrs"] * (size - 2), "rrcs", *["rcs"] * (size - 2), "r"]
        cells = [f"i{(rank - at) % size}" for at in range(len(kinds))]
        steps: list[Step] = [(kind, cell, cell, "") for kind, cell in zip(kinds, cells, strict=True)]
        gpus.append([((rank + 1) % size, (rank - 1) % size, steps)])
    return msccl("ring", size, gpus)


def msccl_all_pairs(size: int) -> str:
    """Everyone reduces its chunk from scratch and sends it to all: all pairs, of MSCCLang's paper."""
    gpus = []
    for rank in range(size):
        own, blocks = f"i{rank}", []
        for block, peer in enumerate(peer for peer in range(size) if peer != rank):
            theirs = f"i{peer}"
            steps: list[Step] = [("s", theirs, theirs, ""), ("r", own, f"s{block}", "")]
            steps += [("s", own, own, f"{size - 1}.{size - 2}"), ("r", theirs, theirs, "")]
            blocks.append((peer, peer, steps))
        adds: list[Step] = [("re", f"s{block}", own, f"{block}.1") for block in range(size - 1)]
        gpus.append([*blocks, (-1, -1, adds)])
    return msccl("all_pairs", size, gpus)
