"""Whom the pre-flight names, on made-up fleets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.preflight.figures import (
    ABSENT,
    CPU,
    DIED,
    GPU_ERROR,
    GPUS,
    INTERFACE,
    NO_GPU,
    NODE_LINK,
    SCRATCH,
    SHARED,
    SILENT,
    UNCHECKED,
    WRONG_PRODUCT,
    Disk,
    Fault,
    Figures,
)
from cluster.preflight.judgement import judge
from cluster.preflight.table import report

H100 = "NVIDIA H100"


def fleet(*rates: float, device: str = H100, first: int = 1) -> list[Figures]:
    """Nodes n1, n2, ... with one rank each."""
    return [
        Figures(rank, f"n{first + rank}", 0, device=device, matmul_tflops=rate, clock_s=0.0)
        for rank, rate in enumerate(rates)
    ]


def ring(*rates: float, device: str = H100) -> list[Figures]:
    """Nodes in a ring; `rates[i]` is the link from node i to the next one."""
    nodes = fleet(*[700.0] * len(rates), device=device)
    return [
        replace(node, link_gb_per_s={nodes[i - 1].node: rates[i - 1], nodes[(i + 1) % len(nodes)].node: rates[i]})
        for i, node in enumerate(nodes)
    ]


def with_fault(nodes: Sequence[Figures], kind: str, *names: str) -> list[Figures]:
    return [replace(node, faults=(Fault(kind, "trouble"),)) if node.node in names else node for node in nodes]


@pytest.mark.parametrize(
    ("rates", "bad"),
    [
        ((700, 690, 710), []),
        ((700, 690, 553), ["n3"]),  # 79.6 % of 695
        ((700, 690, 557), []),  # 80.1 %
        ((300, 700), []),  # of two, either may be the exception
        ((300, 310, 700, 700), ["n1", "n2"]),
        ((300, 310, 320, 700, 700, 700, 700, 700, 700), ["n1", "n2", "n3"]),
    ],
)
def test_a_gpu_that_falls_behind_the_other_nodes_is_named(rates: Sequence[float], bad: list[str]) -> None:
    assert sorted(judge(fleet(*rates), []).bad) == bad


def test_a_job_of_one_node_is_compared_with_the_fleets_history() -> None:
    history = fleet(700, 690, 5000, first=11)  # one figure is nonsense
    assert judge(fleet(500), history).bad.keys() == {"n1"}
    assert judge(fleet(680), history).bad == {}
    assert judge(fleet(500), fleet(700, first=11)).bad == {}, "two nodes are too few"
    assert judge(fleet(500), [replace(each, device="NVIDIA A100") for each in history]).bad == {}


def test_a_nodes_own_history_neither_excuses_nor_condemns_it() -> None:
    was_slow = [Figures(0, "n1", rank, device=H100, matmul_tflops=300) for rank in range(8)]
    assert judge(fleet(300), [*was_slow, *fleet(700, 690, first=11)]).bad.keys() == {"n1"}
    was_fast = [replace(each, matmul_tflops=700) for each in was_slow]
    assert judge(fleet(700, 690, 695), was_slow).bad == {} and judge(fleet(300, 690, 695), was_fast).bad.keys() == {
        "n1"
    }


def test_one_slow_gpu_of_eight_is_named_with_its_number_and_the_threshold() -> None:
    nodes = [
        Figures(8 * node + gpu, f"n{node}", gpu, num_local_ranks=8, device=H100, matmul_tflops=700)
        for node in range(3)
        for gpu in range(8)
    ]
    nodes[8 + 5] = replace(nodes[8 + 5], matmul_tflops=350)
    assert judge(nodes, []).bad == {"n1": ["matmul 350 TFLOP/s on GPU 5, 50% of the fleet's median (threshold 80%)"]}


def test_rates_of_cpus_only_warn() -> None:
    judgement = judge(fleet(0.3, 0.9, 0.9, device=f"{CPU} x8"), [])
    assert judgement.bad == {} and judgement.warnings.keys() == {"n1"}


@pytest.mark.parametrize(
    ("rates", "bad"),
    [
        ((40, 41, 39, 40), []),
        ((12, 12, 40, 40), ["n2"]),  # both links of n2; n1 and n3 have a good one
        ((12, 40, 40, 40), []),  # a slow link whose nodes are sound elsewhere
        ((12, 12, 40), ["n2"]),
        ((0, 0, 40), ["n2"]),
        ((0, 0, 0), []),  # a wrong interface for all
    ],
)
def test_a_nodes_better_link_counts(rates: Sequence[float], bad: list[str]) -> None:
    assert sorted(judge(ring(*rates), []).bad) == bad


def test_a_lost_link_condemns_cpus_too() -> None:
    judgement = judge(ring(0, 0, 1, device=f"{CPU} x8"), [])
    assert judgement.bad == {"n2": ["no connection with n1 and n3"]} and judgement.warnings == {}


@pytest.mark.parametrize("kind", [SILENT, DIED, ABSENT])
def test_a_node_that_dies_does_not_condemn_its_neighbours(kind: str) -> None:
    pair = with_fault(ring(0, 0), kind, "n2")
    assert judge(pair, []).bad == {"n2": ["trouble"]}
    four = with_fault(ring(0, 0, 40, 40), kind, "n2")
    judgement = judge(four, [])
    assert judgement.bad == {"n2": ["trouble"]} and judgement.warnings == {}
    cut = with_fault(ring(0, 0, 0, 40), kind, "n2")  # n3 has no link with n4, either: one of the two is cut off as well
    assert judge(cut, []).bad.keys() == {"n2", "n3"}


def test_two_nodes_that_only_cannot_reach_each_other_are_warned_of() -> None:
    judgement = judge(ring(0, 40, 40, 40), [])
    assert judgement.bad == {} and judgement.warnings.keys() == {"n1", "n2"}


def fleet_of_links(*rates: float) -> list[Figures]:
    return [Figures(i, f"m{i}", 0, 1, H100, link_gb_per_s={"m99": rate}) for i, rate in enumerate(rates)]


def test_one_bad_network_card_of_eight_is_named_with_its_rank() -> None:
    def eight(rate: float) -> list[Figures]:
        return [
            Figures(
                8 * i + gpu,
                f"n{i}",
                gpu,
                8,
                H100,
                link_gb_per_s={f"n{j}": rate if gpu == 5 and 1 in (i, j) else 40.0 for j in near},
            )
            for i, near in enumerate([(3, 1), (0, 2), (1, 3), (2, 0)])
            for gpu in range(8)
        ]

    slow = "bandwidth between nodes 10 GB/s on GPU 5, 25% of the fleet's median (threshold 50%)"
    assert judge(eight(10), []).bad == {"n1": [slow]}
    judgement = judge(eight(0), [])
    assert judgement.bad == {"n1": ["no connection of local rank 5 with n0 and n2"]} and judgement.warnings == {}
    assert judge(eight(40), []).bad == {}
    alone = [
        replace(each, link_gb_per_s=dict.fromkeys(each.link_gb_per_s, 0.0)) for each in eight(40) if each.node == "n1"
    ]
    assert judge(alone, []).bad == {} and len(judge(alone, []).common) == 1
    whole = [next((mine for mine in alone if mine.rank == each.rank), each) for each in eight(40)]
    assert judge(whole, []).bad == {"n1": ["no connection with n0 and n2"]}, "once, not for each rank"
    one_card = [replace(each, link_gb_per_s={"n99": 5.0}) for each in alone]
    assert judge(one_card, fleet_of_links(40, 40, 40)).bad == {}, (
        "eight ranks on one card are no match for a rank alone"
    )


def test_of_two_nodes_with_a_slow_link_history_tells_which() -> None:
    def pair(rate: float, *, names: str = "ab") -> list[Figures]:
        a, b = (Figures(rank, name, 0, device=H100) for rank, name in enumerate(names))
        return [replace(a, link_gb_per_s={b.node: rate}), replace(b, link_gb_per_s={a.node: rate})]

    others = pair(40, names="cd")
    assert judge(pair(5), others).bad == {}, "nothing is known of either"
    b_was_slow = [*others, *pair(40, names="ax")[:1], *pair(5, names="by")[:1]]
    assert judge(pair(5), b_was_slow).bad.keys() == {"b"}
    assert judge(pair(40), b_was_slow).bad == {}
    assert judge(pair(5), [*others, *pair(5)]).bad == {}, "the same slow pair again"


@pytest.mark.parametrize("kind", [WRONG_PRODUCT, ABSENT, INTERFACE, SCRATCH])
def test_what_one_node_has_names_it_and_what_most_have_names_nobody(kind: str) -> None:
    nodes = fleet(*[700] * 6)
    assert judge(with_fault(nodes, kind, "n2"), []).bad == {"n2": ["trouble"]}
    assert judge(with_fault(nodes, kind, "n2", "n3", "n4"), []).bad.keys() == {"n2", "n3", "n4"}
    most = judge(with_fault(nodes, kind, "n1", "n2", "n3", "n4"), [])
    assert most.bad == {} and most.warnings == {}
    assert most.common == ["4 of 6 nodes have this, so it is not a node's fault: trouble (n1)"]


def test_two_different_troubles_name_two_nodes() -> None:
    nodes = with_fault(with_fault(fleet(700, 700), SCRATCH, "n1"), WRONG_PRODUCT, "n2")
    assert judge(nodes, []).bad.keys() == {"n1", "n2"}


def test_the_node_of_a_job_of_one_is_named_only_for_what_cannot_be_a_setting() -> None:
    alone = [Figures(0, "n1", 0)]
    for kind in (WRONG_PRODUCT, SCRATCH, NO_GPU):
        assert judge(with_fault(alone, kind, "n1"), []).bad.keys() == {"n1"}
    for kind in (INTERFACE, f"{SHARED} runs", ABSENT):
        judgement = judge(with_fault(alone, kind, "n1"), [])
        assert judgement.bad == {} and len(judgement.common) == 1
        lines = report(alone, [], judgement, homeless=[], took_s=9)
        assert lines[2].startswith("n1 ") and lines[2].endswith("warning"), "not sound: there is a warning below"


def test_a_job_of_one_does_not_go_through_the_site_for_what_may_be_a_setting() -> None:
    history = fleet(700, 690, 680, first=11)
    links = [replace(each, node_gb_per_s=400.0, link_gb_per_s={"n99": 40.0}) for each in history]
    alone = [replace(fleet(690)[0], num_local_ranks=1)]
    lost = with_fault(alone, NODE_LINK, "n1")
    slow_inside = [replace(alone[0], node_gb_per_s=100.0)]
    slow_outside = [replace(alone[0], link_gb_per_s={"n99": 4.0})]
    for of_site in (fleet(300), lost, slow_inside, slow_outside):
        assert judge(of_site, links).bad.keys() == {"n1"} == judge(of_site, links, named={"n1"}).bad.keys()
        later = judge(of_site, links, named={"n1", "n7"})
        assert later.bad == {} and len(later.common) == 1
    for kind in (GPUS, NO_GPU, GPU_ERROR, WRONG_PRODUCT, SILENT):
        assert judge(with_fault(alone, kind, "n1"), [], named={"n7"}).bad.keys() == {"n1"}
    both = [replace(alone[0], faults=(Fault(INTERFACE, "no ib0"), Fault(NODE_LINK, "no connection")))]
    assert judge(both, []).bad == {}, "without the interface there is no link"
    two = with_fault(fleet(300, 700), NODE_LINK, "n1")
    assert judge(two, links, named={"n7"}).bad.keys() == {"n1"}, (
        "of two nodes, the other one shows that it is no setting"
    )


def test_gpus_of_a_part_of_a_node_may_be_far_from_each_other() -> None:
    near = [replace(each, num_local_ranks=2, node_gb_per_s=400.0) for each in fleet(700, 690, 680, first=11)]
    far = [replace(each, num_local_ranks=2, node_gb_per_s=100.0) for each in fleet(700)]
    assert judge(far, near).bad.keys() == {"n1"}
    for nodes in (far, [*far, *near]):
        judgement = judge(nodes, near, is_part=True)
        assert judgement.bad == {} and len(judgement.common) + len(judgement.warnings) == 1
    assert judge(fleet(300), near, is_part=True).bad.keys() == {"n1"}, "a GPU is as fast in any company"


def test_no_node_whose_gpus_nobody_sees_trains_on_its_cpus() -> None:
    judgement = judge(with_fault(fleet(700, 700), NO_GPU, "n1", "n2"), [])
    assert judgement.bad.keys() == {"n1", "n2"} and judgement.common == []


def test_a_shared_directory_is_a_nodes_fault_only_if_few_have_it() -> None:
    nodes = fleet(*[700] * 6)
    assert judge(with_fault(nodes, f"{SHARED} runs", "n2"), []).bad.keys() == {"n2"}
    judgement = judge(with_fault(nodes, f"{SHARED} runs", "n2", "n3"), [])
    assert judgement.bad == {} and judgement.warnings.keys() == {"n2", "n3"}


def test_a_shared_directory_that_stalls_on_many_nodes_is_the_servers_fault() -> None:
    nodes = fleet(*[700] * 32)
    for count, bad in ((10, 0), (7, 7)):
        names = [f"n{number}" for number in range(1, count + 1)]
        judgement = judge(with_fault(nodes, f"{SHARED} runs", *names), [])
        assert (len(judgement.bad), len(judgement.warnings)) == (bad, count - bad)


def test_our_own_mistakes_are_warnings() -> None:
    judgement = judge(with_fault(fleet(700, 700, 700), UNCHECKED, "n2"), [])
    assert judgement.bad == {} and judgement.warnings.keys() == {"n2"}


def test_little_room_in_scratch_is_bad_and_in_a_shared_directory_a_warning() -> None:
    scratch, shared, sound = fleet(700, 700, 700)
    scratch = replace(scratch, scratch=Disk("/scratch", 500, 0.4))
    shared = replace(shared, shared=(Disk("runs", 500, 0.4),))
    judgement = judge([scratch, shared, replace(sound, scratch=Disk("/scratch", 500, 1.1))], [])
    assert judgement.bad == {"n1": ["/scratch has 0.4 GB free (threshold 1 GB)"]}
    assert judgement.warnings == {"n2": ["runs has 0.4 GB free (threshold 1 GB)"]}


@pytest.mark.parametrize(
    ("clocks_s", "bad", "warned"),
    [
        ((0, 0.5, -1.5), [], []),
        ((0, 0.1, 5), [], ["n3"]),
        ((0, -90, -90.2), ["n1"], []),  # rank 0's own clock is wrong
        ((0, 90), [], ["n2"]),  # of two, either may be
    ],
)
def test_clocks_are_compared_with_the_median(clocks_s: Sequence[float], bad: list[str], warned: list[str]) -> None:
    nodes = [replace(node, clock_s=clock_s) for node, clock_s in zip(fleet(*clocks_s), clocks_s, strict=True)]
    judgement = judge([replace(node, matmul_tflops=None) for node in nodes], [])
    assert (sorted(judgement.bad), sorted(judgement.warnings)) == (bad, warned)


def test_the_table_of_many_nodes_shows_only_those_with_something_to_say() -> None:
    nodes = fleet(*[700] * 20, 300, *[710] * 11)
    lines = report(nodes, [], judge(nodes, []), homeless=[], took_s=9)
    rows = {line.split("  ")[0]: line for line in lines[2:4]}
    assert "43%" in rows["n21"] and rows["n21"].endswith("bad")
    assert "700 to 710" in rows["31 others"] and rows["31 others"].endswith("sound")
    assert lines[-1].startswith("preflight: n21 is bad: matmul 300 TFLOP/s, 43% of the fleet's median")
    assert len(lines) == 5
