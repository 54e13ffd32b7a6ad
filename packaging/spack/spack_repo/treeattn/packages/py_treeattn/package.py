import os

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage

# From here to the checkout, whose dist/ `python -m build --sdist` fills.
CHECKOUT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 6))


class PyTreeattn(PythonPackage):
    """Exact attention decode over a KV cache sharded across MPI ranks, with a choosable reduction."""

    homepage = "https://arxiv.org/abs/2408.04093"

    license("Apache-2.0")

    # An sdist of one's own has no checksum that could stand here: spack install --no-checksum py-treeattn
    version("0.1.0", url=f"file://{CHECKOUT}/dist/treeattn-0.1.0.tar.gz")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-numpy@1.26:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-click@8.1:")
        depends_on("py-msgspec@0.18:")
        depends_on("py-tomli@2:", when="^python@:3.10")
        depends_on("py-rich@13:")
