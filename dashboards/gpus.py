"""The dashboard *GPUs*: are they there, is their time well used, what holds them back, what is wrong with them."""

from __future__ import annotations

from dashboards.board import ALERTS_OF_NODE, JOB, NUMERICAL, SOME_NODES, Board, Row, Variable
from dashboards.gpu_health import FIRST_ROW, LEGEND, errors, inventory, links, mig
from dashboards.palette import ABSENT, BAD, BLUE, GOOD, PLAIN, THROTTLES, WARNING, fixed, named
from dashboards.panels import About, Panel, above, bars, below, lines, stat, states, steps, to, words
from dashboards.queries import Query, now

UID = "training-gpus"
GPU = Variable(
    "gpu",
    "GPU",
    'label_values(gpu_up{job=~"$job", instance=~"$node"}, gpu)',
    sort=NUMERICAL,
    what="The GPU's number, as the job counts.",
)
TO_RANKS = to("training-ranks", "Ranks on this node")
NO_COUNTERS = (
    f"No performance counters: GPUs before Hopper have none, divided ones (MIG) neither. {FIRST_ROW}"
)


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
            Row("NVLink and PCIe", links()),
            Row("Errors", errors()),
            Row("Divided GPUs (MIG)", mig(), collapsed=True),
            Row("What is in the machine?", inventory(), collapsed=True),
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
            now(
                "sum(gpu_devices_expected{@node}) - sum(gpu_devices{@node} or 0 * gpu_devices_expected{@node}) > 0",
                "missing",
                BAD,
            ),
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
            now("max(rate(gpu_clocks_event_seconds_total{@gpu, @heat}[$__rate_interval]))"),
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
    return (
        lines(
            "How busy are the SMs?",
            Query("gpu_sm_activity_ratio{@gpu}", LEGEND),
            unit="percentunit",
            most=1,
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
            Query("max by (instance) (gpu_memory_total_bytes{@gpu})", "{{instance}} size of one", bound=True),
            unit="bytes",
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
            now("gpu_memory_used_bytes{@gpu} / gpu_memory_total_bytes{@gpu}", "GPU {{gpu}} {{instance}}"),
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
    return (
        lines(
            "How much power does each GPU draw?",
            Query("gpu_power_watts{@gpu}", LEGEND),
            Query(
                'min by (instance) (gpu_power_limit_watts{@gpu, limit="enforced"})',
                "{{instance}} limit",
                bound=True,
            ),
            unit="watt",
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
                "any `thermal`, `hw_thermal`, `sw_thermal` (heat) or `hw_power_brake` (the power supply asked for it).",
                "the panel beside says which GPU. Heat: cooling. Brake: the power supply or the rack's limit.",
            ),
            empty=f"No counters of reasons on this driver. {FIRST_ROW}",
        ),
        lines(
            "Which GPU is held back by heat or power supply?",
            Query(
                "max by (instance, gpu) (rate(gpu_clocks_event_seconds_total{@gpu, @heat}[$__rate_interval]))",
                LEGEND,
            ),
            unit="percentunit",
            links=(TO_RANKS,),
            about=About(
                "Share of time in which heat or the power supply held a GPU back.",
                "above zero for minutes. The rank on it is then the straggler of the run.",
                "drain the node if it lasts; *Ranks and stragglers* shows what it costs.",
            ),
            empty=f"No counters of reasons on this driver. {FIRST_ROW}",
        ),
    )
