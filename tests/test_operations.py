"""docs/operations.md: what XLA makes of each operation; each substitute is lowered and gives the same."""

from bench import operations


def test_each_operation_has_its_verdict_and_each_substitute_is_lowered(mesh):
    found = operations.measure(mesh)
    wrong = [one for one in found if one[1:] != (one[0].verdict, operations.LOWERED)]
    assert len(found) >= 44 and wrong == []


def test_the_page_is_what_the_command_writes():
    assert operations.PAGE.read_text() == operations.page()
