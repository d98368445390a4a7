"""docs/operations.md: what XLA makes of each operation; each substitute is lowered and gives the
same."""

from bench import operations


def test_each_operation_has_its_verdict_and_a_lowered_substitute(mesh):
    found = operations.measure(mesh)
    assert len(found) >= 44
    for case, verdict, substitute in found:
        assert verdict == case.verdict, case
        assert substitute == operations.LOWERED, case


def test_the_page_is_what_the_command_writes():
    assert operations.PAGE.read_text() == operations.page()
