"""How MPI launchers learn of the nodes: host files and environment, for MPICH and for Open MPI."""

from __future__ import annotations

from collections.abc import Mapping

from emulation.plan import Plan

__all__ = ["environment", "host_files"]


def host_files(plan: Plan) -> dict[str, str]:
    """Name and text of the files that list the nodes in the order in which ranks fill them."""
    nodes = [f"node{index}" for index in range(plan.nodes)]
    # Where ranks are left after the last line, MPICH's launcher starts again at the first.
    each = list(zip(nodes, plan.ranks_per_node, strict=True))
    return {
        "mpich_hosts": "".join(
            f"{node}:{ranks if plan.placement == 'block' else 1}\n" for node, ranks in each
        ),
        "openmpi_hosts": "".join(f"{node} slots={ranks}\n" for node, ranks in each),
    }


def environment(plan: Plan, folder: str, caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, with what makes a plain `mpiexec -n 8 ...` spread over the nodes.

    `folder` holds the host files and the remote shell. Tuning that the caller has set already stays.
    """
    cyclic = plan.placement == "cyclic"
    tuning = {
        # Root may start jobs; ob1 over TCP skips a second of probing for fabrics that are not there.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "^ofi",
        # Each node believes that it has all cores to itself: waiting ranks must be told to let others run.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
        # Binding would put the ranks of all nodes on the same first cores.
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    remote_shell = f"{folder}/remote_shell"
    placing = {
        "HYDRA_LAUNCHER": "rsh",
        "HYDRA_LAUNCHER_EXEC": remote_shell,
        "HYDRA_HOST_FILE": f"{folder}/mpich_hosts",
        # Open MPI 5 and later, then 4.
        "PRTE_MCA_plm_ssh_agent": remote_shell,
        "PRTE_MCA_prte_default_hostfile": f"{folder}/openmpi_hosts",
        "PRTE_MCA_rmaps_default_mapping_policy": "node" if cyclic else "slot",
        "OMPI_MCA_plm_rsh_agent": remote_shell,
        "OMPI_MCA_orte_default_hostfile": f"{folder}/openmpi_hosts",
        "OMPI_MCA_rmaps_base_mapping_policy": "node" if cyclic else "slot",
    }
    return {**tuning, **caller, **placing}
