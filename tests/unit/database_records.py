"""Records for the tests of the tuning database."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from click.testing import CliRunner

from tvmflow.cli.db import db
from tvmflow.database import KeyParts, Provenance, Record
from tvmflow.errors import TvmflowError

V2 = ("popcnt", "sse3", "sse4.2")
V3 = (*V2, "avx2", "fma")
V4 = (*V3, "avx512f", "avx512vl")
# TVM's JSON of b[i] = a[i] + a[i] for 4 elements, packed.
WORKLOAD = (
    "eNrNWW1v2zYQ/i/8LBiiRL0Zw4AUW4cAazEkxb4UhkBblCNUEgWK9pIF/u87UrasFyuS7HTtl8IRyePdcw+f47GvSHAuwySP2DNaYss0UM4jVq"
    "Ll11ckXwqGlugzzxk6GPXfiVh8Ub8MFFFJ0fIVlQXN0dI8NCbFcbJ4lCLJt/U8lNEk7xj6I+Vrmv5NRd+aAdPAJXCIZix8SnKJltahvfwvkWSX"
    "fYEPp2m5dAlqLQRTpwWkbfA+l/dZNuQMMdCepjuY63RjvROCvtTrvrqrxrhgKX1ePD7Rgg05q80C6h6EGyUZxH3oGWDPhais/A6/hnz0G8auQC"
    "tOOZW2hfrbf2F5ycXQ+lL5hZZBbQmrqCK2TzZMT7gQ1jvija0rAcf2zYhj0jR3JXDYmYPcJQSwgVusuzBn1TnFuyIdBChOWBqpiPx+RB93+WZo"
    "XUEFzdQ6oLJgcGax4gQTyZ6FMayrJu1EoqCLaVqyMdmQiXhe5JymCS2b8rHmPK1nSbFjI3bKECyhkUlbLUhh+ZKtwXpn8idanMG0sGFZhmXrf4"
    "lhdcD9LdnIOylF2QApDCP4GoYgZE7nIDzyndiwzyB1Z19+KaX4tSOYjwrnBux6WagkEowC5GmSq+NioA1Pd1leEYvlUVgPqD9Og8Q6TMIDXSW7"
    "HRkZPe62Ofm823gO1Rt6b17pkE0O0zfUjP2wi2MmRmBSZ72UXNAtC8sNV5+soBYF21KjItEF2QalYinLQh7HpTpYtlPZDeFkbPOMqQLpghZV42"
    "FMN2BYV9CUvvCd1PvSNOUbKlkU0iiCUdsdY8De6mT/UrW2/CNiXlWv4Zd/uJG5xHuDuR75XtQieJ6K/twUIk0KkS6FCHkHChFnlEL2BAqRU9F3"
    "TxQi3pgKBAbxv0PNc8zDLKNT9FBXq6FbKJ5DKcc+c3kOpW4f7uZV9Q7oXXdoVdjVNQLinwWkVfnURa8pIHYwyloygbWNY1554l4tTPb7SNpkpI"
    "IzUsE8pLrNjrN6F/7+GLAeaL5tntwsUeUFJI89Sy2InpLQfoc7GWcl0PVtrFXT1Mi869jemcBJj3RJ6Y1KNOrWnnvJRNt4xKEN8XTyQPU9kOkE"
    "5oTVIoXzk2A0CiXdwqhnDL0KdMjj+QNl74FtE56PvzTMyj2ZlHz3nHwfTw3E73YAVd9XhTHYravirWmjzpnqmPTspW+P7UZW/x8G7mQMvBsxIH"
    "4DA39st2CsQK3xz1aelLjWYmBPl92rNoDO9IduMHr23Yt0+ZPTqEeWwDu+tnROTJJDT60ut4F/czg2vqkOzgkHm+ZIPNhsPfkUcMdc3EUXgHHP"
    "huBzADbW6i9rlrcN4X2EO39fcwO4Ta31eHVKj2qCTbvlc0tc9IvL4vED9AvfLp1+XT+gmqi3Si1+VN2+fdjpHwFjKqlm6/03wMf2I6xcUTOAgh"
    "mVm6fGJ3CJ5jmXVIKQqA9E+ZhU7cuaRxotZ8jTBwbd0L99BFy/9rh67HPB50IwiB26IQhBGdehgvVeWz0oHRr5j7xfxl0II+W8CHW9dQEVrcxu"
    "Q5ldoPE3QL8VmFeX4rVKDOih7tqagGDTV20hKzqSPiNhjlsnzPHOCXP8VsKcoJcw1+wlzMUd/1zrQsKCuQkzO/lyrFa+HOecL9yCQadENXXqoX"
    "OobKn/K6H6gW9pued3T6KJLI/XIgfX/mP8JiVsA7cfsfsPjoY9qx5pUWnOqDUwg4/gkHOYYe7t90yMvTnG7h8+8WiXNlOm3oZP7FTKe3yIBbIp"
    "d/UWxOgE4NYZwNivlyR5zPUnIMwKuMYkPW0i91m4B8rp+wUyF5a3MBcFLyXcEw7/ATTQl1w="
)
NATIVE = (*V4, "avx512vnni", "gfni")


def parts_of(
    workload: int = 0, mcpu: str = "x86-64-v4", features: Sequence[str] = V4, threads: int = 2, fast_math: bool = False
) -> KeyParts:
    return KeyParts(
        workload=hashlib.sha256(str(workload).encode()).hexdigest(),
        target={
            "kind": "llvm",
            "machine": "x86_64",
            "mcpu": mcpu,
            "features": tuple(features),
            "threads": threads,
            "arch": None,
        },
        numerics={"fast_math": fast_math, "tf32": False},
        preparation=1,
    )


def record_of(
    workload: int = 0, median_s: float = 1e-3, parts: KeyParts | None = None, tvm: str = "0.27.0.post1", seed: int = 0
) -> Record:
    return Record(
        parts=parts or parts_of(workload),
        name=f"matmul {workload}x64x64",
        workload_json=WORKLOAD,
        trace=[
            [
                ["GetSBlock", [], ["matmul", "main"], ["b0"]],
                ["GetLoops", ["b0"], [], ["l1"]],
                ["SamplePerfectTile", ["l1"], [2, 64], ["v2", "v3"]],
                ["SampleCategorical", [], [[0, 16], [0.25, 0.75]], ["v4"]],
            ],
            [[2, [1, 64]], [3, 1]],
        ],
        timings_s=(median_s * 1.1, median_s, median_s * 0.9),
        flop=2.0 * 64**3,
        provenance=Provenance(
            versions={"apache-tvm": tvm},
            machine="box",
            cpu="some CPU",
            threads=2,
            date="2025-01-31T12:00:00Z",
            seed=seed,
            trials=64,
            protocol="local 3x",
            tvmflow="0.1.0",
        ),
    )


def tvmflow_db(*arguments: object) -> str:
    """What `tvmflow db` prints; its errors are raised."""
    result = CliRunner().invoke(db, [*map(str, arguments)])
    if isinstance(result.exception, TvmflowError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout
