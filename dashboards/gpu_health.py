"""Rows of the dashboard *GPUs*: links, errors, divided GPUs, and what is in the machine."""

from __future__ import annotations

from dashboards.palette import BAD, GREY, KHAKI, PLAIN, PURPLE, WARNING
from dashboards.panels import YES_NO, About, Panel, above, lines, words
from dashboards.queries import Query, events
from dashboards.tables import Column, table

LEGEND = "{{instance}} GPU {{gpu}}"
FIRST_ROW = "The first row tells a missing GPU from a dead exporter."


def links() -> tuple[Panel, ...]:
    """Give the panels about traffic over NVLink and PCIe."""

    def traffic(title: str, family: str, what: str, do: str, empty: str) -> Panel:
        return lines(
            title,
            Query(f"sum by (instance, gpu) (rate({family}{{@gpu}}[$__rate_interval]))", LEGEND),
            unit="Bps",
            w=6,
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


def errors() -> tuple[Panel, ...]:
    """Give the panels about what is wrong with the cards."""
    drain = (
        "drain the node when the action asks for it; a count that stands still since yesterday needs nothing."
    )
    return (
        lines(
            "New errors",
            Query(events("gpu_xid_errors_total{@gpu}", "xid", born=True), "Xid {{xid}}", BAD),
            Query(
                events('gpu_ecc_errors_total{@gpu, scope="volatile"}', "kind") + " > 0",
                "ECC {{kind}}",
                WARNING,
            ),
            Query(events("gpu_pcie_errors_total{@gpu}", "kind") + " > 0", "PCIe {{kind}}", KHAKI),
            Query(events("gpu_pcie_replays_total{@gpu}") + " > 0", "PCIe replays", GREY),
            Query(events("gpu_nvlink_errors_total{@gpu}", "kind") + " > 0", "NVLink {{kind}}", PURPLE),
            unit="none",
            bars=True,
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
            Column("instance", "Node"),
            Column("gpu", "GPU", width=60),
            Column("xid", "Xid", width=70),
            Column("sum by (instance, gpu, xid) (gpu_xid_errors_total{@gpu})", "Times", width=70),
            Column(
                "max by (instance, gpu, xid) (gpu_xid_last_timestamp_seconds{@gpu}) * 1000",
                "Last",
                unit="dateTimeAsIso",
                width=170,
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
            Column("instance", "Node"),
            Column("gpu", "GPU", width=60),
            Column("min by (instance, gpu) (gpu_up{@gpu})", "Answers", width=90, mappings=YES_NO),
            Column(
                "max by (instance, gpu) (gpu_recovery_action{@gpu})",
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
            Column(
                'sum by (instance, gpu) (gpu_ecc_errors_total{@gpu, kind="uncorrected", scope="volatile"})',
                "Uncorrected ECC",
                thresholds=above(1, 1),
            ),
            Column(
                "max by (instance, gpu) (gpu_remapped_rows_pending{@gpu})",
                "Row waits for reset",
                mappings=words({0: ("no", PLAIN), 1: ("yes", WARNING)}),
            ),
            Column(
                "max by (instance, gpu) (gpu_remapped_rows_failed{@gpu})",
                "Row lost",
                mappings=words({0: ("no", PLAIN), 1: ("replace the card", BAD)}),
            ),
            Column(
                'sum by (instance, gpu) (gpu_nvlink_links{@gpu, state="inactive"})',
                "NVLinks out of use",
                thresholds=above(1),
            ),
            Column(
                'max by (instance, gpu) (gpu_pcie_link_width{@gpu, kind="max"} - ignoring (kind)'
                ' gpu_pcie_link_width{@gpu, kind="current"})',
                "PCIe lanes missing",
                thresholds=above(1),
            ),
            sort="Answers",
            descending=False,
            about=About(
                "One line for each GPU, with what its driver and its memory say of themselves.",
                "a *no*, or any colour but blue.",
                "do what the driver asks for, with the node drained. A row that waits is replaced at the next reset; "
                "missing PCIe lanes: reseat the card.",
                "the card does not tell that.",
            ),
            empty=f"No GPU answers. {FIRST_ROW}",
            h=10,
        ),
    )


def mig() -> tuple[Panel, ...]:
    """Give the panels about instances of divided GPUs."""
    legend = "{{instance}} GPU {{gpu}} {{mig_uuid}}"
    return (
        lines(
            "How busy are the instances' SMs?",
            Query("gpu_mig_sm_activity_ratio{@gpu}", legend),
            unit="percentunit",
            most=1,
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
            about=About(
                "Allocated share of each instance's memory.", "close to 100 %.", "choose a larger profile."
            ),
            empty="No divided GPU (MIG) here.",
        ),
    )


def inventory() -> tuple[Panel, ...]:
    """Give the table of what is in the machine."""
    return (
        table(
            "GPUs and their drivers",
            Column("instance", "Node"),
            Column("gpu", "GPU", width=60),
            Column("name", "Model"),
            Column("driver", "Driver", width=110),
            Column("cuda_driver", "CUDA", width=70),
            Column("vbios", "VBIOS", width=140),
            Column("serial", "Serial", width=140),
            Column("pci_bus_id", "PCI address", width=150),
            Column(
                'max by (instance, gpu, uuid) (gpu_pcie_link_generation{@gpu, kind="current"})',
                "PCIe generation",
                width=130,
            ),
            Column(
                'max by (instance, gpu, uuid) (gpu_pcie_link_width{@gpu, kind="current"})', "Lanes", width=70
            ),
            Column(
                'max by (instance, gpu, uuid) (gpu_power_limit_watts{@gpu, limit="enforced"})',
                "Power limit",
                unit="watt",
                width=100,
            ),
            Column("uuid", "UUID"),
            of="max by (instance, gpu, name, driver, cuda_driver, vbios, serial, pci_bus_id, uuid) (gpu_info{@gpu})",
            about=About(
                "What the GPUs are.",
                "different drivers, VBIOS or power limits on nodes of one run.",
                "bring them to the same version: stragglers are made so.",
                "the GPU does not answer.",
            ),
            empty=f"No GPU answers. {FIRST_ROW}",
        ),
    )
