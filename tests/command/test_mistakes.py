"""Mistakes of a newcomer, each answered by one sentence, or by the right number.

Words of commands, and the files that they name: code 2, a line that says what is wrong, and nothing written.
Starts of ranks, with a piece forgotten.
"""

import functools
import io
import os
import shlex
import struct
import subprocess
import sys

import numpy as np
import pytest

from tests.support.drawn import sample
from tests.support.models import write_model
from treeattn.collectives import Schedule, Transfer, build

from .launch import CACHE, ROOT, in_process, mpirun, run, treeattn
from .test_decode_command import cache_with
from .test_generate import byte_tokenizer
from .test_verify_command import NODES, PARENTS, written


def saved(save, *arrays, **named):
    """The bytes of a file of NumPy."""
    save(file := io.BytesIO(), *arrays, **named)
    return file.getvalue()


#: Files by name, beside "model": bytes, a text, or None for a folder. own.json is for 3 ranks.
FILES = {
    "results.jsonl": (ROOT / "tests/data/compare.jsonl").read_bytes(),
    "own.json": build("chain", 3).to_json(),
    "empty.jsonl": "",
    "cut.json": '{\n "read_rate_gb_s": 1.0, "rows',
    "text.txt": "hello\n",
    "twice.json": Schedule("twice", 2, 1, ((Transfer(1, 0),),) * 2).to_json(),
    "mscclpp.json": '{"name": "x", "gpus": []}',
    "control.json": Schedule("\x1b[31m", 1, 1, ()).to_json(),
    "truncated": CACHE.read_bytes()[:100_000],
    "empty.safetensors": b"",
    "mislabelled": b"PK\x03\x04 this is not a safetensors file at all",
    "huge_header": struct.pack("<Q", 1 << 60) + b"{}",
    "folder": None,
    "empty.npz": b"",
    "text.npz": b"not an archive",
    "array.npz": saved(np.save, np.zeros(1)),
    "objects.npz": saved(np.savez, out=np.array([None]), lse=np.zeros(1)),
}
#: What is changed of the small file of `treeattn decode`, and of that of `treeattn verify`.
CACHES = {
    "no_k": {"k": None},
    "types": {"k": np.ones((1, 6, 2, 16), np.float16)},
    "heads": {"q": np.ones((1, 1, 3, 16), np.float32)},
    "three_axes": {"q": np.ones((1, 4, 16), np.float32)},
    "scale": {"scale": "a half"},
    "causal": {"causal": np.array(1)},
    "causal_2": {"causal": np.array(2)},
    "three_causal": {"causal": np.zeros(3)},
    "three_sides": {"window": np.array([1, 2, 3])},
    "half_window": {"window": np.array([1.5, 2])},
    "below_0": {"window": np.array([-2, 0])},
    "early": {"q": np.ones((1, 7, 4, 16), np.float32), "causal": np.array(1)},
}
TREES = {
    "tree": {},
    "no_parents": {"parents": None},
    "no_draft_k": {"draft_k": None},
    "few_parents": {"parents": PARENTS[:, :4]},
    "circle": {"parents": np.array([[1, 0, 1, 1, 1, 1, 1, 1], PARENTS[1]])},
    "draft_v": {"draft_v": np.zeros((2, NODES, 2, 8), np.float32)},
    "window": {"window": np.array([4, 0])},  # nodes see the whole context
}

#: Command -> its words, and a part of the line.
BAD = {
    "": """
        nonsense                                            | No such command 'nonsense'
        decod                                               | did you mean decode?
    """,
    "calibrate": """
        --out a.toml                                        | two ranks or more
        --out a.json                                        | name it FILE.toml
        --out Caps.toml                                     | name it FILE.toml
        --out none/a.toml                                   | cannot be written
        --out a.toml --json a.toml                          | named twice
        --out a.toml --executor nccl                        | nccl
        --out a.toml --seconds -1                           | seconds
        --out a.toml --seconds nan                          | give a number of seconds
    """,
    "compare": """
        --schemes rang                                      | there is no scheme 'rang'
        --schemes ''                                        | there is no scheme ''
        --seq-len many                                      | give a whole number
        --dtype int8                                        | choose from float32, float16
        --heads 6 --kv-heads 4                              | heads must be a multiple of kv_heads
        --head-dim 7                                        | head_dim 7 is not supported
        --bytes 8:1Mi:2                                     | or FIRST:LAST:xFACTOR
        --bytes 64 --heads 4                                | --bytes says how many a reduction has
        --schemes chain,kv_ring --bytes 64                  | kv_ring: attends while it communicates
        --library-algorithm ring                            | 2 ranks or more
        --library-algorithm ring --device cuda              | --device cpu
        --out /nowhere/at/all.jsonl                         | cannot be written
        --schemes chain --cluster summit                    | no such cluster
    """,
    f"decode {CACHE}": f"""
        --layout sizes=1,2                                  | names 2 shards for 1 ranks
        --layout spiral                                     | choose one of contiguous
        --scheme binary_three                               | there is no scheme 'binary_three'
        --scheme hierarchical:nodes=1+2                     | hold 3 ranks, but there are 1
        --scheme ''                                         | there is no scheme ''
        --repeat 0                                          | 0 is not in the range
        --device abacus                                     | is not one of 'cpu', 'cuda'
        --out /nowhere/at/all.safetensors                   | cannot be written
        --json /proc/facts.json                             | cannot be written
        --out {ROOT}                                        | is not an ordinary file
        --expect {CACHE}                                    | no tensor 'out' in the file
        --colour blue                                       | No such option '--colour'
    """,
    "check-partials": """
        none.npz                                            | No such file
        empty.npz                                           | not a readable .npz file
        text.npz                                            | not a readable .npz file
        array.npz                                           | not a readable .npz file
        objects.npz                                         | not a readable .npz file
    """,
    "decode --out out.safetensors": """
        truncated                                           | not a readable safetensors file
        empty.safetensors                                   | not a readable safetensors file
        mislabelled                                         | not a readable safetensors file
        huge_header                                         | not a readable safetensors file
        none.safetensors                                    | no such file
        folder                                              | is not an ordinary file
        no_k                                                | no tensor 'k' in the file; it holds q, v
        types                                               | k is float16, expected float32
        heads                                               | 3 query heads cannot be grouped over 2 KV heads
        three_axes                                          | q has shape [1, 4, 16], expected four axes
        scale                                               | 'scale' is 'a half', not a finite number
        causal_2                                            | causal must be one 0 or 1, not 2
        three_causal                                        | causal must be one 0 or 1, not [0.0, 0.0, 0.0]
        three_sides                                         | window must be whole numbers [2]
        half_window                                         | window must be whole numbers [2]
        early                                               | a sequence is shorter than its 7 queries
        below_0                                             | window
        causal --scheme kv_ring                             | kv_ring lets every query see every token
    """,
    "generate --model model": """
                                                            | give one of --prompt
        --prompt-ids 1 --prompt a                           | give one of --prompt
        --prompt-ids 1,256                                  | the model's vocabulary ends at 255
        --prompt-ids a                                      | '--prompt-ids': a: whole numbers
        --prompt-ids 111111111111111111111111111111         | whole numbers, separated by commas
        --prompt-file /nowhere.txt                          | /nowhere.txt: cannot be read
        --prompt-ids 1 --scheme nonsense                    | there is no scheme 'nonsense'
        --prompt-ids 1 --scheme ring --decode kv_ring       | --scheme ring is of --decode tree
        --prompt-ids 1 --scheme head_scatter                | leaves each rank its slice of heads
        --prompt-ids 1 --draft ngram --decode kv_ring       | attends while it communicates
    """,
    "paper": """
        sorcery                                             | 'sorcery' is not one of
        ''                                                  | '' is not one of
        --json ''                                           | is not an ordinary file
    """,
    "plot": """
                                                            | Missing argument
        no-such-file.jsonl                                  | cannot be read (No such file or directory)
        ''                                                  | cannot be read (Is a directory)
        empty.jsonl                                         | hold no rows
        cut.json                                            | not a row of treeattn compare
        results.jsonl --figures pie                         | choose from time, relative
        results.jsonl --figures ''                          | choose from time, relative
        results.jsonl --format gif                          | choose from png, svg
        results.jsonl --format ''                           | choose from png, svg
        results.jsonl --width 3                             | give 2in to 40in
        results.jsonl --baseline chian                      | not among these results
        results.jsonl --baseline ''                         | not among these results
        results.jsonl --out ''                              | --out is empty: name a folder for the figures
        results.jsonl --out /nowhere/at/all                 | no folder can be made there
        results.jsonl --out text.txt                        | no folder can be made there
        results.jsonl --json ''                             | is not an ordinary file
        results.jsonl --out . --json time.svg               | is named twice on this command line
    """,
    "report": """
        empty.jsonl --out r.html                            | hold no rows
    """,
    "roofline": """
        --tokens 1000000000                                 | choose fewer tokens
        --dtypes int8                                       | choose from float32, bfloat16, float16
        --groups 0                                          | give numbers from 1 on
        --threads 99999999999                               | 256 are the most of one process
    """,
    "schedule": """
        chain                                               | --ranks N: over how many ranks
        chain --ranks 0                                     | 0 is not in the range
        chian --ranks 4                                     | there is no scheme 'chian'
        k_ary_tree:radix=1 --ranks 4                        | radix=1 is not allowed
        hierarchical --ranks 4 --nodes 5                    | a number of nodes that 4 ranks fill
        hierarchical --ranks 4 --nodes 3+3                  | or the ranks of each, as 4+4+2
        hierarchical --ranks 4 --nodes 0                    | give a number of nodes
        hierarchical --ranks 4 --nodes two                  | give a number of nodes
        ring --ranks 100000                                 | take a scheme with fewer messages
        mpi_allreduce --ranks 4                             | mpi_allreduce is a library and has no schedule
        kv_ring:rotation=full --ranks 4                     | kv_ring is a baseline and has no schedule: take
        chain --ranks 4 --out /nowhere/at/all.svg           | cannot be written
        own.json --ranks 4                                  | is for 3 ranks, --ranks says 4
        none.json                                           | cannot be read
        cut.json                                            | not the JSON of a schedule
        twice.json                                          | counts rank
        mscclpp.json                                        | is not read: give the algorithm as XML of MSCCL
        control.json                                        | at most 100 printable characters
    """,
    "simulate": """
        --ranks 8                                           | for which machine
        --cluster summit --ranks 8                          | no such cluster
        --cluster laptop                                    | over how many of the 8 places
        --cluster laptop --ranks 9                          | has 8 places
        --cluster laptop --ranks 2 --arrivals 0+1us+2us     | 3 instants for 2 ranks
        --cluster laptop --ranks 2 --arrivals soon          | 'soon': take together
        --cluster laptop --ranks 2 --schemes own.json       | own.json: size: the schedule is for 3 ranks
        --cluster laptop --ranks 2 --schemes mpi_allreduce  | has no schedule
        --cluster laptop --ranks 2 --tokens 9 --kv-heads 3  | --kv-heads 3 does not divide --heads 16
        --cluster laptop --ranks 2 --kv-heads 2             | give --tokens
        --cluster laptop --ranks 2 --placement 0+0          | both have place 0
        --cluster laptop --ranks 2 --placement 0+9          | no place 9
        --cluster laptop --ranks 2 --placement 0+1+2        | 3 places for 2 ranks
        --cluster laptop --ranks 2 --placement sideways     | take block, cyclic, suited
        --cluster laptop --ranks 2 --executor nccl          | choose from slots
        --cluster laptop --ranks 2 --format svg             | draws one scheme
        --cluster laptop --ranks 2 --out x.svg              | add --format
    """,
    "tune": """
        --ranks 4                                           | for which machine
        --cluster laptop                                    | --ranks
        --cluster laptop --ranks 9                          | has 8 places
        --cluster laptop --ranks 1                          | ranks
        --cluster laptop --ranks 2 --out own.toml           | end in .json
    """,
    "verify --out out.safetensors": """
        no_parents                                          | no tensor 'parents'
        no_draft_k                                          | no tensor 'draft_k'
        few_parents                                         | parents has shape [2, 4]
        circle                                              | node 0 has parent 1
        draft_v                                             | they must be the same
        window                                              | leave window out
        tree --scheme kv_ring                               | attends while it communicates
        tree --scheme binary_tree,ring                      | name one with --scheme
        tree --json tree                                    | named twice
        tree --layout sizes=3                               | adds up to 3 tokens
    """,
}
CASES = [
    (f"{command} {words.strip()}", message.strip())
    for command, lines in BAD.items()
    for words, message in (line.split("|") for line in lines.strip("\n ").splitlines())
]
BY_RANKS = ("truncated", "no_k", "no_parents", "few_parents", "circle", "draft_v", "window", "kv_ring")
OF_RANKS = [row for row in CASES if row[0].endswith(BY_RANKS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of `FILES`, `CACHES`, `TREES` and a model."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name, changes in CACHES.items():
        cache_with(folder / name, **changes)
    for name, changes in TREES.items():
        written(folder / name, **changes)
    byte_tokenizer().save(str(write_model(folder / "model", "grouped_llama3") / "tokenizer.json"))
    return folder


@pytest.fixture
def refused(files, tmp_path, monkeypatch):
    """Called with how a command is started, its words and what it is to say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREEATTN_CLUSTER", "")
    names = {path.name for path in files.iterdir()}

    def check(start, words, message):
        done = start(*(files / word if word in names else word for word in shlex.split(words)), code=2)
        assert message in " ".join(done.stderr.split())
        assert not list(tmp_path.iterdir())
        assert {path.name for path in files.iterdir()} == names

    return check


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words for words, _ in CASES])
def test_one_line_says_what_is_wrong(refused, words, message):
    refused(in_process, words, message)


@pytest.mark.parametrize(("words", "message"), OF_RANKS, ids=[words for words, _ in OF_RANKS])
def test_ranks_refuse_together(refused, words, message):
    refused(functools.partial(treeattn, ranks=2), words, message)


#: What every rank of it should print is the mean of all ranks' numbers.
PROGRAM = """
import os, sys
import numpy as np
import treeattn
names = "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = np.float32(next((os.environ[name] for name in names if name in os.environ), 0))
q, k = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 3, 1, 8), np.float32)
out, lse = treeattn.decode(q, k, k + rank, scheme=(sys.argv[1:] or [None])[0])
sys.stdout.write(f"{out.mean()}\\n")
"""
MPIEXEC, ALONE = "{mpiexec} -n 2 {python} {program}", "{python} {program}"
ELSEWHERE = "{mpiexec} -n 2 env -i PATH={path} PYTHONPATH={root} {python} {program}"
# As rootless containers have it: out of a user namespace no environment can be read.
ROOTLESS = ELSEWHERE.replace("env -i", "unshare --user --map-root-user env -i")
TWO = "{mpiexec} -n 1 {python} {program} ring : -n 1 {python} {program} chain"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
#: A start, its words, its variables -> the number of each rank, or a sentence; test_torchrun.py has its own.
LAUNCHES = [
    ("mpiexec", "{mpiexec} -n 2 {python} -m mpi4py {program}", {}, [0.5, 0.5]),
    ("mpiexec without -m mpi4py", MPIEXEC, {}, [0.5, 0.5]),
    ("no launcher", ALONE, {}, [0.0]),
    ("sbatch without srun", ALONE, SLURM, [0.0]),
    ("srun without a plug-in", ALONE, SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=pmi2 for MPICH"),
    ("mpirun of another MPI", ALONE, OPEN_MPI, "the launcher started 2 processes"),
    ("an environment that does not arrive", ELSEWHERE, {}, "one of 2 processes"),
    ("an environment out of which none is read", ROOTLESS, {}, "one of 2 processes"),
    ("ranks of two minds", TWO, {}, "scheme differs between ranks"),
]


@pytest.mark.parametrize(
    ("start", "words", "variables", "told"), sample(8, LAUNCHES), ids=[row[0] for row in LAUNCHES]
)
def test_a_start_of_which_a_piece_is_forgotten(start, words, variables, told, tmp_path):
    if "unshare" in words and subprocess.run(["unshare", "--user", "true"], check=False).returncode:
        pytest.skip("this system gives users no namespaces")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = {"python": sys.executable, "mpiexec": mpirun(2)[0], "program": program, "root": ROOT}
    words = words.format(**given, path=os.environ["PATH"]).split()
    settings = {"PYTHONPATH": str(ROOT), **variables}
    done = run("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words, code=None, **settings)
    assert (done.returncode == 0) == isinstance(told, list), done.stderr
    if isinstance(told, list):
        assert [float(line) for line in done.stdout.split()] == told
    else:
        assert done.stdout == ""
        assert told in done.stderr
