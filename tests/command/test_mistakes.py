"""Mistakes of a newcomer, each answered by one sentence, or by the right number.

Words of commands: code 2, a line that says what is wrong, and nothing written; what is wrong with files, and
what takes a model, is with the tests of its command. Starts of ranks, with a piece forgotten.
"""

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.drawn import sample
from treeattn.collectives import build

from .launch import ROOT, in_process, mpiexec, run

CACHE = ROOT / "tests/data/smollm2_layer17_4096.safetensors"

#: Command -> its words, and a part of the line. {results}: of compare; {own}: a schedule for 3 ranks.
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
    "paper": """
        sorcery                                             | 'sorcery' is not one of
        ''                                                  | '' is not one of
        --json ''                                           | is not an ordinary file
    """,
    "plot": """
                                                            | Missing argument
        no-such-file.jsonl                                  | cannot be read (No such file or directory)
        ''                                                  | cannot be read (Is a directory)
        {empty}                                             | hold no rows
        {cut}                                               | not a row of treeattn compare
        {results} --figures pie                             | choose from time, relative
        {results} --figures ''                              | choose from time, relative
        {results} --format gif                              | choose from png, svg
        {results} --format ''                               | choose from png, svg
        {results} --width 3                                 | give 2in to 40in
        {results} --baseline chian                          | not among these results
        {results} --baseline ''                             | not among these results
        {results} --out ''                                  | --out is empty: name a folder for the figures
        {results} --out /nowhere/at/all                     | no folder can be made there
        {results} --out {text}                              | no folder can be made there
        {results} --json ''                                 | is not an ordinary file
        {results} --out . --json time.svg                   | is named twice on this command line
    """,
    "report": """
        {empty} --out r.html                                | hold no rows
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
        {own} --ranks 4                                     | is for 3 ranks, --ranks says 4
        none.json                                           | cannot be read
        {cut}                                               | not the JSON of a schedule
    """,
    "simulate": """
        --ranks 8                                           | for which machine
        --cluster summit --ranks 8                          | no such cluster
        --cluster laptop                                    | over how many of the 8 places
        --cluster laptop --ranks 9                          | has 8 places
        --cluster laptop --ranks 2 --arrivals 0+1us+2us     | 3 instants for 2 ranks
        --cluster laptop --ranks 2 --arrivals soon          | 'soon': take together
        --cluster laptop --ranks 2 --schemes {own}          | own.json: size: the schedule is for 3 ranks
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
}
CASES = [
    (f"{command} {words.strip()}", message.strip())
    for command, lines in BAD.items()
    for words, message in (line.split("|") for line in lines.strip("\n ").splitlines())
]


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words for words, _ in CASES])
def test_one_line_says_what_is_wrong(words, message, tmp_path, monkeypatch):
    files = {"own": tmp_path / "own.json", "results": ROOT / "tests/data/compare.jsonl"}
    files["own"].write_text(build("chain", 3).to_json())
    for name, content in {"empty": "", "cut": '{\n "read_rate_gb_s": 1.0, "rows', "text": "hello\n"}.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(content)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    done = in_process(*shlex.split(words.format(**files)), TREEATTN_CLUSTER="", code=2)
    assert message in " ".join(done.stderr.split())
    assert sorted(tmp_path.iterdir()) == before


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


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec")
@pytest.mark.parametrize(
    ("start", "words", "variables", "told"), sample(8, LAUNCHES), ids=[row[0] for row in LAUNCHES]
)
def test_a_start_of_which_a_piece_is_forgotten(start, words, variables, told, tmp_path):
    """It ends with a sentence, or every rank prints the right number."""
    if "unshare" in words and subprocess.run(["unshare", "--user", "true"], check=False).returncode:
        pytest.skip("this system gives users no namespaces")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = {"python": sys.executable, "mpiexec": mpiexec(), "program": program, "root": ROOT}
    words = words.format(**given, path=os.environ["PATH"]).split()
    settings = {"PYTHONPATH": str(ROOT), **variables}
    done = run("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *words, code=None, **settings)
    assert (done.returncode == 0) == isinstance(told, list), done.stderr
    if isinstance(told, list):
        assert [float(line) for line in done.stdout.split()] == told
    else:
        assert done.stdout == ""
        assert told in done.stderr
