"""The dashboard *GPUs*: are they there, is their time well used, what holds them back, what is wrong with them."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, NUMERICAL, SOME_NODES, Board, Row, Variable
from dashboards.palette import (
    ABSENT,
    BAD,
    BLUE,
    GOOD,
    GREY,
    KHAKI,
    PLAIN,
    PURPLE,
    THROTTLES,
    WARNING,
    bounds,
    by_last_character,
    by_query,
    fixed,
    named,
)
from dashboards.panels import (
    About,
    Column,
    Panel,
    above,
    bars,
    below,
    lines,
    stat,
    states,
    steps,
    table,
    to,
    words,
)
from dashboards.queries import Query, events, now, rows

UID = "training-gpus"

GPU = Variable(
    "gpu",
    "GPU",
    'label_values(gpu_up{job=~"$job", instance=~"$node"}, gpu)',
    sort=NUMERICAL,
    what="The GPU's number, as the job counts.",
)
LEGEND = "{{instance}} GPU {{gpu}}"
TO_RANKS = to("training-ranks", "Ranks on this node")
FIRST_ROW = "The first row tells a missing GPU from a dead exporter."
NO_COUNTERS = (
    f"No performance counters: GPUs before Hopper have none, divided ones (MIG) neither. {FIRST_ROW}"
)
HEAT_AND_POWER = "hw_thermal|sw_thermal|hw_power_brake|thermal"


def board() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Training / GPUs",
        what="Use, memory, power, heat, clocks, links and errors of the GPUs of some nodes.",
        variables=(JOB, SOME_NODES, GPU),
        rows=(
            Row("At a glance", _glance()),
            Row("Is the GPUs' time well used?", _use()),
            Row("Memory", _memory()),
            Row("Power, heat and clocks", _power()),
            Row("NVLink and PCIe", _links()),
            Row("Errors", _errors()),
            Row("Divided GPUs (MIG)", _mig(), collapsed=True),
            Row("What is in the machine?", _inventory(), collapsed=True),
        ),
        marks=(ALERTS_OF_NODE,),
    )


def _glance() -> tuple[Panel, ...]:
    return (
        states(
            "Do the exporter, the driver and each GPU answer?",
            Query("up{@node}", "{{instance}} exporter"),
            Query(
                "gpu_nvml_up{@node} == 1 or on (job, instance) max by (job, instance)"
                ' (2 * gpu_nvml_error_info{@node, reason="library_not_found"}) or on (job, instance) gpu_nvml_up{@node}',
                "{{instance}} driver",
            ),
            Query("gpu_up{@gpu}", LEGEND),
            mappings=words({1: ("answers", GOOD), 0: ("down", BAD), 2: ("no driver here", ABSENT)}),
            about=About(
                "Three things that have to answer before a GPU has numbers: the exporter (Prometheus' own verdict), "
                "NVIDIA's library, and the GPU.",
                "an orange-red bar. Exporter down: nothing of this node is known. Driver down: the GPUs may be well, "
                "but cannot be asked. GPU down: it fell off the bus, hangs, or waits for a reset.",
                "exporter: look at its log. Driver: *Why is there no driver, or no GPU?* beside. GPU: its Xid errors "
                "below; drain the node and reset it. Grey, *no driver here*, is a machine without GPUs: all is well.",
                "Prometheus did not scrape this node then, or the exporter did not know of the GPU yet.",
            ),
            empty="Prometheus has no such node: is it in the scrape configuration?",
            w=14,
            h=10,
        ),
        stat(
            "GPUs",
            now("sum(gpu_devices{@node})", "answer"),
            now("sum(gpu_devices_expected{@node})", "expected"),
            unit="none",
            text="value_and_name",
            about=About(
                "GPUs that answer, and those that there should be: as many as the job was given, or the most seen.",
                "fewer answer than are expected.",
                "find the GPU in the bar on the left, then its last Xid under *Errors*.",
                "the driver does not answer at all.",
            ),
            empty="no driver",
            w=5,
        ),
        stat(
            "Mean SM activity",
            now("avg(gpu_sm_activity_ratio{@gpu})"),
            unit="percentunit",
            decimals=0,
            thresholds=below(0.5, 0.2),
            about=About(
                "Share of SM cycles with work, over all GPUs: what *utilisation* is usually believed to be.",
                "below 50 % while a job trains; below 20 % the GPUs mostly wait.",
                "see on *Training run* whether data, checkpoints or the slowest rank make them wait.",
                "no GPU with performance counters (Hopper and later) answers.",
            ),
            empty="no counters",
            w=5,
        ),
        stat(
            "Power of all GPUs",
            now("sum(gpu_power_watts{@gpu})"),
            unit="watt",
            about=About(
                "What the cards draw now.",
                "a third of the limit or less while the job trains.",
                "see whether they wait (SM activity) or are held back (clocks).",
                "no GPU answers.",
            ),
            w=5,
            h=3,
        ),
        stat(
            "Held back by heat or power",
            now(
                'max(rate(gpu_clocks_event_seconds_total{@gpu, reason=~"'
                + HEAT_AND_POWER
                + '"}[$__rate_interval]))'
            ),
            unit="percentunit",
            decimals=0,
            thresholds=above(0.01, 0.1),
            about=About(
                "Share of time in which the worst of the GPUs ran slower because of heat or of the power supply.",
                "anything above zero that lasts; one slow GPU slows the whole run.",
                "*Why did the clocks drop?* names GPU and reason: cooling for thermal, the power supply for a brake.",
                "no GPU answers.",
            ),
            w=5,
            h=3,
        ),
        stat(
            "Why is there no driver, or no GPU?",
            now(
                "max by (instance, reason) (gpu_nvml_error_info{@node})"
                " or label_replace(max by (instance, gpu, reason) (gpu_error_info{@gpu})"
                ' unless on (instance) gpu_nvml_error_info{@node}, "what", "GPU $1: ", "gpu", "(.+)")'
                ' or label_replace(min(gpu_up{@gpu}) == 1, "reason", "all GPUs answer", "", "")'
                ' or label_replace(max(up{@node}) == 0, "reason", "exporter down", "", "")',
                "{{instance}} {{what}}{{reason}}",
            ),
            unit="none",
            text="name",
            color=fixed(PLAIN),
            about=About(
                "What the exporter was told by NVIDIA's library, or why it cannot ask it.",
                "anything but *all GPUs answer*. `library_not_found`: no driver, or the container was given no GPU. "
                "`gpu_is_lost`: the card fell off the bus. `hung`: a call of the driver does not return.",
                "`library_not_found`: give the exporter access to the GPUs, or ignore it on a CPU node. "
                "`gpu_is_lost` and `hung`: drain the node, reset or reboot it.",
                "Prometheus has no such node.",
            ),
            empty="unknown node",
            w=10,
            h=3,
        ),
    )


def _use() -> tuple[Panel, ...]:
    digits = by_last_character()
    return (
        lines(
            "How busy are the SMs?",
            Query("gpu_sm_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            most=1,
            overrides=digits,
            links=(TO_RANKS,),
            about=About(
                "Share of SM cycles in which at least one warp was resident, over all SMs of a GPU.",
                "one GPU below the others (its rank has less work or waits), or all of them in a saw-tooth (they wait "
                "for data, for a checkpoint, or for a slow rank).",
                "one GPU: *Ranks and stragglers*. All: the phases on *Training run*.",
            ),
            empty=NO_COUNTERS,
        ),
        lines(
            "How busy are the tensor cores?",
            Query('gpu_tensor_activity_ratio{@gpu, pipe="any"}', LEGEND),
            unit="percentunit",
            most=1,
            overrides=digits,
            about=About(
                "Share of SM cycles in which tensor cores worked. Good training reaches 40 to 60 %.",
                "busy SMs with idle tensor cores: the time goes into something other than matrix products, or they "
                "run in a precision without tensor cores.",
                "look for a changed precision, for small matrices, or for kernels that fell back.",
            ),
            empty=NO_COUNTERS,
        ),
        lines(
            "How much of the memory bandwidth is used?",
            Query("gpu_dram_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            most=1,
            overrides=digits,
            about=About(
                "Memory bandwidth in use as a share of what is possible.",
                "above 80 % with little tensor activity: the kernels wait for memory.",
                "fuse kernels, use larger matrices or a smaller number format; it is no fault of the machine.",
            ),
            empty=NO_COUNTERS,
        ),
        lines(
            "Does at least one kernel run?",
            Query("rate(gpu_utilization_busy_seconds_total{@gpu}[$__rate_interval])", LEGEND),
            unit="percentunit",
            most=1,
            overrides=digits,
            about=About(
                "Share of time in which at least one kernel ran, from every sample of the driver. 100 % says that "
                "something ran, not that the GPU was full.",
                "well below 100 % while the job trains: the GPU stands still between kernels.",
                "see what the ranks do then: data loading, checkpoint, waiting for each other.",
            ),
            empty=f"No utilisation: divided GPUs (MIG) have none. {FIRST_ROW}",
        ),
    )


def _memory() -> tuple[Panel, ...]:
    return (
        lines(
            "How much memory is used?",
            Query("gpu_memory_used_bytes{@gpu}", LEGEND),
            Query("max by (instance) (gpu_memory_total_bytes{@gpu})", "{{instance}} size of one"),
            unit="bytes",
            overrides=[*by_last_character(), bounds("B")],
            about=About(
                "Device memory that is allocated, and the size of a card (dashed). PyTorch keeps what it once had, so "
                "a full card is normal.",
                "a slow climb over hours (a leak), or one GPU far above the others (uneven shards).",
                "compare with the allocator's own view on *Training run*: reserved and allocated.",
            ),
            empty=f"No memory sizes: on machines with unified memory the GPU has none. {FIRST_ROW}",
            w=10,
        ),
        bars(
            "How full is each GPU?",
            now("gpu_memory_used_bytes{@gpu} / gpu_memory_total_bytes{@gpu}", LEGEND),
            unit="percentunit",
            most=1,
            decimals=0,
            thresholds=steps((None, BLUE), (0.97, WARNING)),
            about=About(
                "Allocated share of each card's memory.",
                "above 97 %: the next larger batch may not fit.",
                "see *Allocator* on *Training run* for retries, which cost time before memory runs out.",
                "the GPU does not answer, or has no memory of its own.",
            ),
            empty=f"No memory sizes. {FIRST_ROW}",
            w=7,
        ),
        bars(
            "Whose memory is it?",
            now(
                "sum by (run, rank, gpu, instance) (training_process_gpu_memory_bytes{@node})",
                "{{run}} rank {{rank}} on {{gpu}}",
            ),
            unit="bytes",
            about=About(
                "GPU memory of the processes of each rank.",
                "a rank on a GPU that is not its own: usually every rank has made a context on GPU 0.",
                "call `torch.cuda.set_device` before the first use of CUDA, or set CUDA_VISIBLE_DEVICES for each rank.",
                "the driver does not tell (MIG, vGPU), or gives process ids of another namespace.",
            ),
            empty="The driver does not say which process holds a GPU, or none of a job does.",
            w=7,
        ),
    )


def _power() -> tuple[Panel, ...]:
    digits = by_last_character()
    limit = bounds("B")
    return (
        lines(
            "How much power does each GPU draw?",
            Query("gpu_power_watts{@gpu}", LEGEND),
            Query('min by (instance) (gpu_power_limit_watts{@gpu, limit="enforced"})', "{{instance}} limit"),
            unit="watt",
            overrides=[*digits, limit],
            about=About(
                "Mean power of the last second (on older cards of the moment), and the limit in force (dashed).",
                "one GPU well below the others under the same load, or a limit lower than the others'.",
                "one GPU: see why its clocks dropped. A low limit: somebody set it (`nvidia-smi -pl`).",
            ),
            empty=f"No power readings. {FIRST_ROW}",
        ),
        lines(
            "How hot is each GPU?",
            Query('gpu_temperature_celsius{@gpu, sensor="gpu"}', LEGEND),
            unit="celsius",
            least=None,
            overrides=digits,
            about=About(
                "Temperature of the chip. What is too hot differs by card: the next panel knows.",
                "one GPU above its neighbours by 10 degrees or more.",
                "check the airflow and the heat sink of that slot.",
            ),
            empty=f"No temperatures. {FIRST_ROW}",
        ),
        lines(
            "How far is it from slowing down?",
            Query('gpu_temperature_margin_celsius{@gpu, threshold="nearest"}', LEGEND),
            Query(
                'gpu_temperature_threshold_celsius{@gpu, threshold="slowdown"}'
                ' - on (job, instance, gpu, uuid) gpu_temperature_celsius{@gpu, sensor="gpu"}',
                LEGEND,
            ),
            unit="celsius",
            least=None,
            overrides=digits,
            thresholds=steps((None, BAD), (5, PLAIN)),
            about=About(
                "Degrees that are left until the card slows itself down: as the card tells it, or for older ones the "
                "distance from its threshold.",
                "below 5 degrees.",
                "more cooling, or a lower power limit before the card lowers its clocks in its own way.",
            ),
            empty=f"Neither a margin nor a threshold is told by these cards. {FIRST_ROW}",
        ),
        lines(
            "How fast do the SMs run?",
            Query('gpu_clock_hertz{@gpu, clock="sm"}', LEGEND),
            unit="hertz",
            overrides=digits,
            about=About(
                "Clock of the SMs. An idle card lowers it by itself.",
                "one GPU below the others while all work: in a synchronous run all others wait for it.",
                "the reason is in *Why did the clocks drop?*.",
            ),
            empty=f"No clocks. {FIRST_ROW}",
        ),
        lines(
            "Why did the clocks drop?",
            Query(
                'sum by (reason) (rate(gpu_clocks_event_seconds_total{@gpu, reason!="low_utilization"}[$__rate_interval]))',
                "{{reason}}",
            ),
            unit="none",
            decimals=2,
            stacked=True,
            overrides=named(THROTTLES),
            about=About(
                "GPUs that ran slower than they could, by reason, on average: 1 is one GPU all of the time. "
                "`sw_power_cap` is normal in training: the card is at its power limit.",
                "any `hw_thermal`, `sw_thermal` (heat) or `hw_power_brake` (the power supply asked for it).",
                "the panel beside says which GPU. Heat: cooling. Brake: the power supply or the rack's limit.",
            ),
            empty=f"No counters of reasons on this driver. {FIRST_ROW}",
        ),
        lines(
            "Which GPU is held back by heat or power supply?",
            Query(
                'sum by (instance, gpu) (rate(gpu_clocks_event_seconds_total{@gpu, reason=~"'
                + HEAT_AND_POWER
                + '"}[$__rate_interval]))',
                LEGEND,
            ),
            unit="percentunit",
            overrides=digits,
            links=(TO_RANKS,),
            about=About(
                "Share of time in which heat or the power supply held a GPU back.",
                "above zero for minutes. The rank on it is then the straggler of the run.",
                "drain the node if it lasts; *Ranks and stragglers* shows what it costs.",
            ),
            empty=f"No counters of reasons on this driver. {FIRST_ROW}",
        ),
    )


def _links() -> tuple[Panel, ...]:
    digits = by_last_character()

    def traffic(title: str, family: str, what: str, do: str, empty: str) -> Panel:
        return lines(
            title,
            Query(f"sum by (instance, gpu) (rate({family}{{@gpu}}[$__rate_interval]))", LEGEND),
            unit="Bps",
            w=6,
            overrides=digits,
            legend="hidden",
            about=About(
                what, "one GPU that differs from all others, or nothing at all while the job trains.", do
            ),
            empty=f"{empty} {FIRST_ROW}",
        )

    nvlink = "compare the ports in use under *Errors*; check that NCCL uses NVLink (`NCCL_DEBUG=INFO`)."
    pcie = "look at width and generation of the link under *What is in the machine?*."
    return (
        traffic(
            "NVLink, sent",
            "gpu_nvlink_transmit_bytes_total",
            "Bytes a second over all ports.",
            nvlink,
            "No NVLink.",
        ),
        traffic(
            "NVLink, received",
            "gpu_nvlink_receive_bytes_total",
            "Bytes a second over all ports.",
            nvlink,
            "No NVLink.",
        ),
        traffic(
            "PCIe, sent",
            "gpu_pcie_transmit_bytes_total",
            "Bytes a second from the GPU: checkpoints, offloaded state.",
            pcie,
            "No PCIe counters on this card.",
        ),
        traffic(
            "PCIe, received",
            "gpu_pcie_receive_bytes_total",
            "Bytes a second to the GPU: mostly training data.",
            pcie,
            "No PCIe counters on this card.",
        ),
    )


def _errors() -> tuple[Panel, ...]:
    drain = (
        "drain the node when the action asks for it; a count that stands still since yesterday needs nothing."
    )
    return (
        lines(
            "New errors",
            Query(events("gpu_xid_errors_total{@gpu}", "xid", born=True), "Xid {{xid}}"),
            Query(
                events('gpu_ecc_errors_total{@gpu, scope="volatile"}', "type") + " > 0",
                "ECC {{type}}",
            ),
            Query(events("gpu_pcie_errors_total{@gpu}", "kind") + " > 0", "PCIe {{kind}}"),
            Query(events("gpu_pcie_replays_total{@gpu}") + " > 0", "PCIe replays"),
            Query(
                events("gpu_nvlink_errors_total{@gpu}", "type") + " > 0",
                "NVLink {{type}}",
            ),
            unit="none",
            bars=True,
            overrides=by_query((BAD, WARNING, KHAKI, GREY, PURPLE)),
            about=About(
                "Errors in each interval by kind. PCIe, NVLink and ECC are shown where they are not zero.",
                "anything that comes again. Xid 48, 63, 64, 74, 79, 94, 95, 119 and 120 are the hardware; 13, 31, 43 "
                "and 45 are mostly the program.",
                drain,
                "no errors, or nothing that could have counted them.",
            ),
            empty="No errors in this time.",
            w=12,
        ),
        table(
            "Which Xid errors were there?",
            rows(
                "max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{@gpu}) * 1000",
            ),
            rows("sum by (instance, gpu, xid) (gpu_xid_errors_total{@gpu})"),
            columns=(
                Column("instance", "Node"),
                Column("gpu", "GPU", width=60),
                Column("xid", "Xid", width=70),
                Column("B", "Times", unit="none", width=70),
                Column("A", "Last", unit="dateTimeAsIso", width=170),
            ),
            sort="Last",
            about=About(
                "Every Xid since the exporter began to listen, with the time of the last.",
                "48, 63, 64, 74, 79, 94, 95, 119, 120: the hardware is failing.",
                drain,
                "no Xid was reported.",
            ),
            empty="No Xid was reported.",
            w=12,
            h=8,
        ),
        table(
            "Which GPU needs something?",
            rows("max by (instance, gpu) (gpu_recovery_action{@gpu})"),
            rows('sum by (instance, gpu) (gpu_ecc_errors_total{@gpu, type="uncorrected", scope="volatile"})'),
            rows("max by (instance, gpu) (gpu_remapped_rows_pending{@gpu})"),
            rows("max by (instance, gpu) (gpu_remapped_rows_failed{@gpu})"),
            rows('sum by (instance, gpu) (gpu_nvlink_links{@gpu, state="inactive"})'),
            rows(
                'max by (instance, gpu) (gpu_pcie_link_width{@gpu, kind="max"} - ignoring (kind)'
                ' gpu_pcie_link_width{@gpu, kind="current"})'
            ),
            columns=(
                Column("instance", "Node"),
                Column("gpu", "GPU", width=60),
                Column(
                    "A",
                    "The driver asks for",
                    mappings=words(
                        {
                            0: ("nothing", PLAIN),
                            1: ("GPU reset", BAD),
                            2: ("reboot", BAD),
                            3: ("drain peers", WARNING),
                            4: ("drain and reset", BAD),
                            5: ("IMEX recovery", BAD),
                            6: ("bus reset", BAD),
                            7: ("system reboot", BAD),
                        }
                    ),
                ),
                Column("B", "Uncorrected ECC", unit="none", thresholds=above(1, 1)),
                Column("C", "Row waits for reset", mappings=words({0: ("no", PLAIN), 1: ("yes", WARNING)})),
                Column("D", "Row lost", mappings=words({0: ("no", PLAIN), 1: ("replace the card", BAD)})),
                Column("E", "NVLinks out of use", unit="none", thresholds=above(1)),
                Column("F", "PCIe lanes missing", unit="none", thresholds=above(1)),
            ),
            about=About(
                "One line for each GPU, with what its driver and its memory say of themselves.",
                "any colour.",
                "do what the driver asks for, with the node drained. A row that waits is replaced at the next reset; "
                "missing PCIe lanes: reseat the card.",
                "the card does not tell that.",
            ),
            empty=f"No GPU answers. {FIRST_ROW}",
            h=10,
        ),
    )


def _mig() -> tuple[Panel, ...]:
    legend = "{{instance}} GPU {{gpu}} {{mig_uuid}}"
    return (
        lines(
            "How busy are the instances' SMs?",
            Query("gpu_mig_sm_activity_ratio{@gpu}", legend),
            unit="percentunit",
            most=1,
            overrides=by_query((BLUE,)),
            about=About(
                "Share of SM cycles of an instance in which a warp was resident.",
                "an instance at zero that somebody pays for.",
                "give it back, or to somebody else.",
            ),
            empty="No divided GPU (MIG) here, or one without performance counters.",
        ),
        lines(
            "How full are the instances?",
            Query("gpu_mig_memory_used_bytes{@gpu} / gpu_mig_memory_total_bytes{@gpu}", legend),
            unit="percentunit",
            most=1,
            overrides=by_query((BLUE,)),
            about=About(
                "Allocated share of each instance's memory.",
                "close to 100 %.",
                "choose a larger profile.",
            ),
            empty="No divided GPU (MIG) here.",
        ),
    )


def _inventory() -> tuple[Panel, ...]:
    return (
        table(
            "GPUs and their drivers",
            rows(
                "max by (instance, gpu, name, driver, cuda_driver, vbios, serial, pci_bus_id, uuid) (gpu_info{@gpu})",
            ),
            rows('max by (instance, gpu, uuid) (gpu_pcie_link_generation{@gpu, kind="current"})'),
            rows('max by (instance, gpu, uuid) (gpu_pcie_link_width{@gpu, kind="current"})'),
            rows('max by (instance, gpu, uuid) (gpu_power_limit_watts{@gpu, limit="enforced"})'),
            columns=(
                Column("instance", "Node"),
                Column("gpu", "GPU", width=60),
                Column("name", "Model"),
                Column("driver", "Driver", width=110),
                Column("cuda_driver", "CUDA", width=70),
                Column("vbios", "VBIOS", width=140),
                Column("serial", "Serial", width=140),
                Column("pci_bus_id", "PCI address", width=150),
                Column("B", "PCIe generation", unit="none", width=130),
                Column("C", "Lanes", unit="none", width=70),
                Column("D", "Power limit", unit="watt", width=100),
                Column("uuid", "UUID"),
            ),
            about=About(
                "What the GPUs are.",
                "different drivers, VBIOS or power limits on nodes of one run.",
                "bring them to the same version: stragglers are made so.",
                "the GPU does not answer.",
            ),
            empty=f"No GPU answers. {FIRST_ROW}",
        ),
    )
