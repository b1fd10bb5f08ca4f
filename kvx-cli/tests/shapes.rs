//! The whole connector between two processes, for every sort of pair of shapes: leases, digests, confirmations; and every element
//! compared.

use kvx_core::layout::NamedLayout;
use serde_json::Value;

use crate::demo::{checked, number};

/// Small enough for many.
const TINY: &str = "--requests 2 --max-tokens 150 --volume 1M";

/// Moves requests from one shape to another, and checks what any such demo says.
fn moved(backend: &str, producer: &str, consumer: &str, more: &str) -> Value {
    let shapes = format!("--producer {producer} --consumer {consumer}");
    let mut command = crate::common::command(&format!("demo --json {TINY} {shapes} {more}"));
    command.arg("--backend").arg(backend);
    let report = checked(&mut command, 0);
    assert_eq!(report["through"], "connector", "{shapes}");
    assert_eq!(report["backend"].as_str(), backend.split(',').next(), "{shapes}");
    let reads = report["mode"] == "read";
    assert_eq!(report["integrity"], reads, "{shapes}");
    assert!(!reads || number(&report, "digests") >= 2, "{shapes}: {report}");
    assert!(number(&report, "notifications") >= 2, "{shapes}: {report}");
    report
}

/// Producer, consumer, and what else: known failures 1, 10, 13, 15, 25 and 28.
const SHAPES: &[(&str, &str, &str)] = &[
    // Tensor parallel, where neither divides the other; fewer heads than ranks on either side.
    ("tp=3", "tp=2", ""),
    ("tp=2", "tp=3", "--mode write"),
    ("tp=16", "tp=2", ""),
    ("tp=2", "tp=16", ""),
    ("tp=16", "tp=2", "--mode write"),
    // Pipeline stages.
    ("tp=1,pp=2", "tp=1", ""),
    ("tp=1", "tp=1,pp=2", ""),
    ("tp=1,pp=2", "tp=1", "--mode write"),
    ("tp=2,pp=2", "tp=1,pp=3", ""),
    // Sizes of blocks.
    ("tp=1,block=16", "tp=1,block=64", ""),
    ("tp=1,block=64", "tp=1,block=16", ""),
    ("tp=2,block=64", "tp=1,block=48,kernel=16", "--mode write"),
    // Replicas.
    ("tp=1,dp=2", "tp=2,dp=2", ""),
    // Latents, which every rank holds whole.
    ("tp=2,block=64", "tp=4,block=16", "--model deepseek-v3"),
    ("tp=4,block=64", "tp=1,block=64", "--model deepseek-v3.2"),
    // States, windows.
    ("tp=2", "tp=1,block=32", "--model nemotron-h-8b"),
    ("tp=1", "tp=2", "--model qwen3-next-80b-a3b"),
    ("tp=1,groups=window", "tp=2,block=32", "--model gemma-3-4b"),
    ("tp=2", "tp=1", "--model llama-4-scout --mode write"),
];

#[cfg(feature = "shm")]
#[test]
fn tensor_parallel_both_ways_over_shared_memory() {
    for producer in [1, 2, 4, 8] {
        for consumer in [1, 2, 4, 8] {
            let report = moved("shm", &format!("tp={producer}"), &format!("tp={consumer}"), "");
            assert_eq!(report["in_process"], false);
            // Every rank of the producer hears of the end of both leases.
            assert_eq!(number(&report, "notifications"), 2 * producer, "{report}");
        }
    }
}

#[cfg(feature = "shm")]
#[test]
fn shapes_of_every_sort_over_shared_memory() {
    for (producer, consumer, more) in SHAPES {
        moved("shm", producer, consumer, more);
    }
}

#[cfg(feature = "shm")]
#[test]
fn every_pair_of_named_layouts_over_shared_memory() {
    let all = NamedLayout::ALL;
    for from in all {
        for to in all {
            let (producer, consumer) = (format!("tp=1,layout={from}"), format!("tp=2,layout={to}"));
            moved("shm", &producer, &consumer, "");
        }
    }
}

/// With the engines in one process, where there is no other way.
#[test]
fn shapes_of_every_sort_on_the_mock() {
    for (producer, consumer, more) in SHAPES.iter().step_by(3) {
        let report = moved("mock", producer, consumer, more);
        assert_eq!(report["in_process"], true);
    }
}

#[cfg(all(feature = "ucx", target_os = "linux"))]
#[test]
fn shapes_of_every_sort_over_ucx_and_tcp() {
    let Some(library) = crate::serve::ucx() else {
        eprintln!("skipped: there is no library of UCX; ./test tools fetches one");
        return;
    };
    let backend = format!("ucx,lib={},tls=tcp", library.display());
    for (producer, consumer) in [("tp=1", "tp=4"), ("tp=8", "tp=2"), ("tp=2", "tp=2")] {
        let report = moved(&backend, producer, consumer, "");
        assert_eq!(report["transport"], "tcp", "{report}");
    }
    for (producer, consumer, more) in SHAPES.iter().filter(|shapes| !shapes.0.contains("tp=16")) {
        moved(&backend, producer, consumer, more);
    }
}
