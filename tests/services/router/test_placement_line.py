"""Who waits in the line for room, and who beside it."""

from services.router.placement_line import PlacementLine


async def test_a_request_in_line_that_must_rest_gives_its_place_to_the_next() -> None:
    line: PlacementLine[str] = PlacementLine()
    line.join("first")
    line.join("second")
    line.rest("first")
    assert len(line) == 2
    line.join("first")
    assert list(line._line) == ["second", "first"]
    line.leave("first")
    line.leave("second")
    assert not len(line)
