"""What is said of the machine."""

import pytest

from train.compare import environment

X86 = """processor\t: 0
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx avx2

processor\t: 1
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx avx2
"""
ARM = """processor\t: 0
Features\t: fp asimd crc32
CPU part\t: 0xd0c
"""


@pytest.mark.parametrize(
    ("told", "expected"),
    [(X86, "AMD EPYC, cpu family 25, model 1, avx2"), (ARM, "0xd0c, asimd")],
)
def test_processor(monkeypatch, tmp_path, told, expected):
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    assert environment.describe_environment()["processor"] == expected


@pytest.mark.parametrize(("told", "expected"), [("arm", "arm"), ("", "unknown")])
def test_processor_that_the_system_does_not_tell(monkeypatch, tmp_path, told, expected):
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(environment.platform, "processor", lambda: told)
    found = environment.describe_environment()
    assert found["processor"] == expected
    assert all(found.values())
