"""What reports say of where ranks ran: which share a machine, and whether they share its cores."""

from treeattn.study.environment import _machine, node_load


def entries(*hosts: tuple[str, str, set[int]]) -> list[dict]:
    """What `placement` makes of ranks on (host, kernel, cores)."""
    everyone = [({"host": host, "cores": len(cores)}, kernel, cores) for host, kernel, cores in hosts]
    return [entry | _machine(kernel, everyone) for entry, kernel, _ in everyone]


def test_ranks_bound_to_cores_of_their_own_are_no_crowd():
    assert node_load(entries(("a", "k1", {0}), ("a", "k1", {1}), ("b", "k2", {0}), ("b", "k2", {1}))) is None


def test_ranks_bound_to_one_core_are_a_crowd():
    warning = node_load(entries(("a", "k1", {0}), ("a", "k1", {0}), ("b", "k2", {0})))
    assert warning == "2 ranks share 1 cores of a: times show waiting, not the scheme"


def test_nodes_of_one_kernel_share_its_cores():
    """Emulated nodes and containers: each believes that it has all cores."""
    ranks = entries(*((f"node{rank // 2}", "k1", {0, 1}) for rank in range(4)))
    assert [entry["machine"] for entry in ranks] == [0, 0, 0, 0]
    assert node_load(ranks) == "4 ranks share 2 cores of node0 and node1: times show waiting, not the scheme"
