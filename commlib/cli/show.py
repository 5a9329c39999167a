"""`commlib show`: algorithms, the actions of each rank and predicted times; meshes; pipelines. Needs no MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from commlib.cli.hierarchy import HIERARCHY, expand_all
from commlib.cli.mesh import make_mesh, mesh_data, mesh_text
from commlib.cli.pipeline import (
    PipelineRequest,
    list_text,
    pipeline_csv,
    pipeline_data,
    pipeline_list,
    pipeline_svg,
    pipeline_text,
)
from commlib.cli.prediction import SIZES, load_machine, make_machine, predict_all
from commlib.console.legend import legend as explain
from commlib.console.text import columns, parse_bytes
from commlib.console.width import fold, reader_width, wrap
from commlib.errors import UsageError
from commlib.pipeline.schedule import PipelineScheduleError
from commlib.schedule import Program, algorithms, find, program, render
from commlib.schedule.hierarchy import HIERARCHICAL

MOST_COLUMNS = 128


def show(
    verb: Annotated[str, typer.Argument(help="all_reduce, broadcast, all_to_all, ...; or mesh, pipeline")],
    algorithm: Annotated[
        str | None,
        typer.Option(help="Draw this algorithm, or 'hierarchical'; without it, list the algorithms of the verb."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. [default: 8; mesh: the product of the axes; pipeline: 4]"),
    ] = None,
    root: Annotated[int | None, typer.Option(min=0, help="The root of a rooted verb. [default: 0]")] = None,
    segments: Annotated[int | None, typer.Option(min=1, help="Pieces in a pipeline. [default: 1]")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Predict times on a described cluster.")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="Predict, hierarchical: nodes. [default: 2]")] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Predict, hierarchical, mesh: ranks per node. [default: 8; 2; mesh: unknown]"),
    ] = None,
    rails: Annotated[int | None, typer.Option(min=1, help="Hierarchical: rails. [default: ranks per node]")] = None,
    between: Annotated[
        str | None, typer.Option(help="Hierarchical: the algorithm between nodes. [default: the first listed]")
    ] = None,
    sizes: Annotated[list[str] | None, typer.Option("--bytes", help="Predict: sizes such as 4K, 64M, 1G.")] = None,
    alpha_us: Annotated[float | None, typer.Option(min=0, help="Network: microseconds per message.")] = None,
    bandwidth_gbs: Annotated[float | None, typer.Option(min=1e-6, help="Network: GB/s of a node's card.")] = None,
    node_alpha_us: Annotated[float | None, typer.Option(min=0, help="In a node: microseconds per message.")] = None,
    node_bandwidth_gbs: Annotated[float | None, typer.Option(min=1e-6, help="In a node: GB/s of a message.")] = None,
    gamma_gbs: Annotated[float | None, typer.Option(min=1e-6, help="GB/s at which a rank combines.")] = None,
    tuning: Annotated[
        Path | None, typer.Option(help="Take these numbers from a file written by 'commlib tune'.")
    ] = None,
    axes: Annotated[str | None, typer.Option(help="Mesh: pp=2,dp=-1,tp=2, the last one fastest.")] = None,
    refactor: Annotated[list[str] | None, typer.Option(help="Mesh: new axes for old ones: dp:edp=-1,ep=4.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Pipeline: draw this schedule, or a CSV file; without it, list them.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline: stages of the model, on all ranks.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Pipeline: microbatches per batch. [default: 8]")
    ] = None,
    costs: Annotated[
        str | None, typer.Option(help="Pipeline: times of F, I and W in a stage. [default: 1,1,1]")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Pipeline: write the picture to this file.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Pipeline: print the schedule as CSV.")] = False,
    legend: Annotated[
        bool | None,
        typer.Option(
            "--legend/--no-legend",
            help="Explain the symbols of a picture. [default: on a terminal; pipeline: elsewhere in one line]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the algorithms of a verb, the actions of each rank in one, or with --predict their predicted times.

    mesh: show the place of each rank along named axes, and the axes that stay inside a node. pipeline: show the
    schedules of pipelines, the idle share of ranks, and their activations and weights.

    Tables and pictures are as wide as the terminal (or COLUMNS); output to a file is not wrapped.
    """
    drawing: dict[str, Any] = {"--ranks": ranks, "--root": root, "--segments": segments}
    hierarchy: dict[str, Any] = {"--rails": rails, "--between": between}
    numbers = {
        "alpha_us": alpha_us,
        "bandwidth_gbs": bandwidth_gbs,
        "node_alpha_us": node_alpha_us,
        "node_bandwidth_gbs": node_bandwidth_gbs,
        "gamma_gbs": gamma_gbs,
    }
    cluster: dict[str, Any] = {
        "--nodes": nodes,
        "--ranks-per-node": ranks_per_node,
        "--bytes": sizes,
        "--tuning": tuning,
    }
    cluster |= {"--" + name.replace("_", "-"): value for name, value in numbers.items()}
    layout = {"--axes": axes, "--refactor": refactor}
    piped: dict[str, Any] = {
        "--schedule": schedule,
        "--stages": stages,
        "--microbatches": microbatches,
        "--costs": costs,
    }
    piped |= {"--costs": costs, "--svg": svg, "--csv": as_csv or None}
    try:
        if verb == "pipeline":
            others = drawing | cluster | layout | {"--algorithm": algorithm, "--predict": predict or None}
            _refuse({name: others[name] for name in others if name != "--ranks"}, "is not for pipeline")
            _pipeline(PipelineRequest(schedule, ranks, stages, microbatches, costs), svg, as_csv, as_json, legend)
            return
        _refuse(piped, "is for pipeline: commlib show pipeline")
        if verb == "mesh" or predict or algorithm != HIERARCHY:
            _refuse(hierarchy, f"is for --algorithm {HIERARCHY}")
        if verb == "mesh":
            others = drawing | cluster | {"--algorithm": algorithm, "--predict": predict or None, "--legend": legend}
            _refuse({name: others[name] for name in others if not name.startswith("--ranks")}, "is not for mesh")
            mesh = make_mesh(axes, refactor or (), ranks)
            _print(mesh_data(mesh) if as_json else mesh_text(mesh, ranks_per_node, reader_width()))
            return
        _refuse(layout, "is for mesh: commlib show mesh")
        if predict:
            _refuse(drawing, "is not for --predict: give --nodes and --ranks-per-node")
            wanted = tuple(map(parse_bytes, sizes or ())) or SIZES
            machine = make_machine(load_machine(tuning) if tuning else None, **numbers)
            prediction = predict_all(verb, nodes or 2, ranks_per_node or 8, wanted, machine, algorithm)
            _print(prediction.to_dict() if as_json else prediction.text(reader_width()))
            return
        if algorithm == HIERARCHY:
            others = {name: cluster[name] for name in cluster if name not in ("--nodes", "--ranks-per-node")}
            _refuse(others | {"--ranks": ranks, "--segments": segments}, f"is not for --algorithm {HIERARCHY}")
            of_nodes = nodes or 2, ranks_per_node or 2
            _check_width("--nodes x --ranks-per-node", prod(of_nodes))
            programs = expand_all(verb, *of_nodes, rails, root or 0, between)
            _draw(HIERARCHICAL[verb], programs, as_json, legend)
            return
        _refuse(cluster, "is for --predict")
        if algorithm is None:
            _refuse(drawing, "is for drawing: give --algorithm")
            _print(_listed(verb) if as_json else _list(verb))
        else:
            size = ranks or 8
            _check_width("--ranks", size)
            programs = [program(verb, algorithm, n, size, root=root or 0, segments=segments or 1) for n in range(size)]
            _draw(find(verb, algorithm).description, programs, as_json, legend)
    except (UsageError, PipelineScheduleError) as error:
        raise typer.BadParameter(str(error)) from error


def _pipeline(
    request: PipelineRequest, svg: Path | None, as_csv: bool, as_json: bool, with_legend: bool | None
) -> None:
    width, name = reader_width(), request.schedule
    if name is None:
        _refuse({"--svg": svg, "--csv": as_csv or None}, "needs --schedule")
        _print(pipeline_list(request) if as_json else list_text(request, width))
    elif svg is not None:
        svg.write_text(pipeline_svg(request, name), encoding="utf-8")
        _print(f"wrote {svg}")
    elif as_csv or as_json:
        _print(pipeline_csv(request, name) if as_csv else pipeline_data(request, name))
    else:
        explained = True if with_legend is None and width is not None else with_legend
        _print(pipeline_text(request, name, width, with_legend=explained))


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value not in (None, [])]
    if given:
        raise typer.BadParameter(f"{given[0]} {why}")


def _print(what: Any) -> None:
    typer.echo(what if isinstance(what, str) else json.dumps(what, indent=1))


def _listed(verb: str) -> list[dict[str, Any]]:
    entries = (find(verb, name) for name in algorithms(verb))
    return [
        {"name": a.name, "description": a.description, "rooted": a.rooted, "segmented": a.segmented} for a in entries
    ]


def _list(verb: str) -> str:
    rows = [[item["name"], item["description"].split("\n")[0]] for item in _listed(verb)]
    indent = max(len(name) for name, _ in rows) + 2
    table = wrap(columns(rows, left=2), reader_width(), indent=indent)
    text = f"{table}\n\ncommlib show {verb} --algorithm NAME draws one."
    if verb in HIERARCHICAL:
        text += f"\nWith several ranks on each of several nodes: --algorithm {HIERARCHY}."
    return text


def _check_width(option: str, ranks: int) -> None:
    if ranks > MOST_COLUMNS:
        raise UsageError(f"'{option}' is {ranks}; at most {MOST_COLUMNS} can be drawn")


def _draw(description: str, programs: Sequence[Program], as_json: bool, with_legend: bool | None) -> None:
    if as_json:
        _print([asdict(each) for each in programs])
        return
    width, picture = reader_width(), render(programs)
    parts = [wrap(description, width), fold(picture, width)]
    if with_legend or (with_legend is None and width is not None):
        parts.append(explain(picture, width))
    _print("\n\n".join(parts).rstrip())
