"""Tables are read whole, and a bad value in one is named."""

import gzip
from pathlib import Path

import pytest

from autoscale.operators.costs import SourceKind
from autoscale.operators.tables import HeadShape, OperatorTables, TableError, load_operator_tables, tables_of

TABLES = Path(__file__).parents[3] / "configs" / "operators" / "tables"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_a_table_is_read_in_seconds(tmp_path: Path) -> None:
    write(tmp_path, "gemm", "dtype,n,k,m,time_us\nbf16,8,4,1,2.5\nbf16,8,4,2,3.5\nfp8,8,4,1,1\n")
    tables = load_operator_tables(tmp_path)
    assert tables.gemm["bf16"][8, 4].at(1.5).value == pytest.approx(3.0e-6)  # rounding
    assert tables.gemm["fp8"][8, 4].axis == (1.0,)
    assert not tables.decode


def test_attention_is_grouped_by_heads(tmp_path: Path) -> None:
    head = "kv_dtype,heads,kv_heads,head_dim"
    write(tmp_path, "decode_attention", f"{head},batch,context_tokens,time_us\nfp8,8,1,128,4,100,7\n")
    write(tmp_path, "mixed_attention", f"{head},new_tokens,decoding,context_tokens,time_us\nfp8,8,1,128,64,4,100,9\n")
    tables = load_operator_tables(tmp_path)
    shape = HeadShape("fp8", 8, 1, 128)
    assert tables.decode[shape].at(4, 100).value == pytest.approx(7e-6)  # rounding
    assert tables.mixed[shape][64].at(4, 100).value == pytest.approx(9e-6)  # rounding


@pytest.mark.parametrize("value", ["nan", "NaN", "-1", "0", "", "inf", "fast"])
def test_a_time_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    write(tmp_path, "all_reduce", f"gpus,message_bytes,time_us\n2,1,5\n2,2,{value}\n")
    with pytest.raises(TableError, match=r"all_reduce.csv.gz: line 3: time_us is"):
        load_operator_tables(tmp_path)


@pytest.mark.parametrize("value", ["nan", "-1", "1.5", "", "many"])
def test_a_size_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    write(tmp_path, "pointwise", f"table,width,rows,time_us\nnorm,8,{value},5\n")
    with pytest.raises(TableError, match=r"line 2: rows is"):
        load_operator_tables(tmp_path)


def test_a_cut_row_is_named(tmp_path: Path) -> None:
    write(tmp_path, "all_reduce", "gpus,message_bytes,time_us\n2,1\n")
    with pytest.raises(TableError, match="line 2: time_us is None"):
        load_operator_tables(tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write(tmp_path, "gemm", "dtype,n,k,time_us\nbf16,8,4,2.5\n")
    with pytest.raises(TableError, match="there is no column m"):
        load_operator_tables(tmp_path)


def test_a_file_that_is_not_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "gemm.csv.gz").write_text("dtype,n,k,m,time_us\n")
    with pytest.raises(TableError, match=r"gemm.csv.gz: cannot be read"):
        load_operator_tables(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "gemm", "dtype,n,k,m,time_us\n" + "bf16,8,4,1,2.5\n" * 100)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TableError, match=r"gemm.csv.gz: cannot be read"):
        load_operator_tables(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="there is no table"):
        load_operator_tables(tmp_path)


def test_a_gpu_without_measurements_has_empty_tables() -> None:
    assert OperatorTables.empty() == tables_of({})
    assert not OperatorTables.empty().gemm


@pytest.mark.parametrize("gpu", ["H100", "H200", "A100", "RTX-PRO-6000"])
def test_shipped_tables_are_read(gpu: str) -> None:
    tables = load_operator_tables(TABLES / gpu)
    assert tables.gemm["bf16"]
    assert tables.decode
    assert tables.chunks or tables.prompts


def test_a_shipped_product_is_the_measured_one() -> None:
    # aiconfigurator's table: H100, fp8, m 64, n 10240, k 8192: 0.038635 ms.
    reading = load_operator_tables(TABLES / "H100").gemm["fp8"][10240, 8192].at(64)
    assert reading.value == pytest.approx(38.635e-6, rel=0.02)  # tables are thinned by at most 2 %
    assert reading.kind in (SourceKind.MEASURED, SourceKind.INTERPOLATED)


def test_shipped_tables_are_small() -> None:
    assert sum(path.stat().st_size for path in TABLES.rglob("*.gz")) < 1.5e6
