"""Lessons in a real JupyterLab in a real browser: open one, run all, look, move a slider."""

from __future__ import annotations

import json

from learner import errors, finished


def run_all(learner) -> str:
    """Run the open notebook; all that its cells put out, as text."""
    cells = learner.run_all()
    assert not errors(cells)
    assert finished(cells)
    return json.dumps([cell["outputs"] for cell in cells])


def test_a_lesson_runs_and_shows_its_picture(learner):
    learner.open("notebooks/00_start_here.ipynb")
    text = run_all(learner)
    assert "[rank 3] hello from rank 3 of 4" in text
    assert "rank 2 raised ValueError" in text
    picture = learner.page.locator(".jp-OutputArea-output img").first
    learner.screenshot("00_start_here", picture)
    assert picture.evaluate("image => image.complete && image.naturalWidth") > 400
    box = picture.bounding_box()
    assert box is not None
    assert box["width"] > 400
    learner.close()


def test_a_slider_draws_anew(learner):
    """The lesson on pipelines: one micro-batch more, another picture and another sentence."""
    learner.open("notebooks/07_pipelines_1.ipynb")
    run_all(learner)
    picture = learner.page.locator("img.widget-image")
    sentence = learner.page.locator("[role=status]", has_text="Simulated, not measured")
    before = picture.get_attribute("src")
    assert "Makespan 33" in sentence.inner_text()
    slider = learner.page.locator(".widget-slider", has_text="micro-batches m")
    handle = slider.locator(".noUi-handle")
    handle.scroll_into_view_if_needed()
    handle.focus()
    learner.page.keyboard.press("ArrowRight")
    learner.page.wait_for_function(
        "before => document.querySelector('img.widget-image').src !== before", arg=before
    )
    assert handle.get_attribute("aria-valuetext") == "9"
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 400
    assert "Makespan 36" in sentence.inner_text()
    learner.screenshot("07_slider", picture)
    learner.close()
