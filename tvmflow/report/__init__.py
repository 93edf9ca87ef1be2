"""Turns manifests, verdicts, samples and audits into what a terminal shows. Their JSON form is the nouns' own."""

from tvmflow.report.artifact import compiled, inspected, signature
from tvmflow.report.bench import samples
from tvmflow.report.diagnosis import attribution, bisection
from tvmflow.report.passes import pipeline
from tvmflow.report.verdict import verdict

__all__ = ["attribution", "bisection", "compiled", "inspected", "pipeline", "samples", "signature", "verdict"]
