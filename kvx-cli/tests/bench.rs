//! Measuring a backend between two processes.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{command, json, kvx};

/// Small enough for a test.
const SMALL: &str = "bench --backend shm --tokens 200 --rounds 6 --small 5";

/// Runs a benchmark that must succeed, and checks what any says.
fn good(arguments: &str) -> Value {
    let report = json(&format!("{SMALL} {arguments}"), 0);
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!(report["backend"], "shm");
    let positive = |value: &Value, what: &str| {
        assert!(value.as_f64().is_some_and(|figure| figure > 0.0), "{what}: {report}");
    };
    for (field, keys) in [
        ("gbps", &["median", "best"][..]),
        ("ratio", &["memcpy", "process_vm"]),
        ("cpu_us_per_request", &["initiator", "target"]),
        ("segments", &["before", "merged"]),
        ("one_block_us", &["p50", "p99"]),
        ("notify_rtt_us", &["p50", "p99"]),
        ("notify_rtt_busy_us", &["p50", "p99"]),
        ("notify_rtt_spin_us", &["p50", "p99"]),
        ("raw_rtt_us", &["p50", "p99"]),
        ("raw_rtt_busy_us", &["p50", "p99"]),
        ("notify_rtt_busy_together_us", &["p50", "p99"]),
        ("raw_rtt_busy_together_us", &["p50", "p99"]),
        ("request_us", &["posted", "settled"]),
    ] {
        for key in keys {
            positive(&report[field][key], field);
        }
    }
    let interval: Vec<f64> =
        report["gbps"]["interval"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
    let median = report["gbps"]["median"].as_f64().unwrap();
    assert!(interval[0] <= median && median <= interval[1], "{report}");
    report
}

#[test]
fn both_modes_and_both_kinds_of_region_are_measured_and_verified() {
    for mode in ["read", "write"] {
        for region in ["shared", "borrowed"] {
            let report = good(&format!("--mode {mode} --region {region}"));
            // 13 blocks of 16 tokens on each of 32 layers, keys and values: 32 KiB each.
            assert_eq!(report["segments"]["merged"], 13 * 64, "{report}");
            assert_eq!(report["bytes"], 13 * 64 * 32 * 1024, "{report}");
            assert_eq!(report["mode"], mode);
            // Writes are compared with both of the kernel's calls.
            let writev = &report["ratios"]["process_vm_writev"]["median"];
            assert_eq!(
                writev.as_f64().is_some_and(|ratio| ratio > 0.0),
                mode == "write",
                "{report}"
            );
            assert_eq!(report["region"], region);
            let route = if region == "shared" { "mapped" } else { "process_vm" };
            assert_eq!(report["route"], route, "{report}");
            assert!(report["transport"].as_str().unwrap().starts_with("shm"), "{report}");
        }
    }
}

#[test]
fn neighbouring_blocks_are_merged_and_shapes_may_differ() {
    let report = good("--blocks contiguous");
    assert_eq!(report["segments"]["merged"], 64);
    assert_eq!(report["segments"]["before"], 13 * 64);
    let report = good("--producer tp=2,layout=hnd --consumer tp=4,block=32");
    assert!(report["segments"]["merged"].as_u64().unwrap() > 1000, "{report}");
    let report = good("--model deepseek-v3 --mode write");
    // 4 blocks of 64 tokens on 61 layers.
    assert_eq!(report["segments"]["merged"], 4 * 61, "{report}");
    assert_eq!(report["bytes"], 4 * 61 * 64 * 576 * 2, "{report}");
}

#[test]
fn another_program_is_compared_and_curves_are_drawn() {
    let picture = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench.svg");
    let mut command = command(SMALL);
    command.args(["--json", "--svg"]).arg(&picture);
    command.args(["--peer-command", "while read turn; do echo 2; done"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let close = |value: &Value, to: f64| (value.as_f64().unwrap() - to).abs() < 1e-9;
    let median = report["gbps"]["median"].as_f64().unwrap();
    assert!(close(&report["others"]["peer"]["median"], 2.0), "{report}");
    assert!(close(&report["ratio"]["peer"], median / 2.0), "{report}");
    assert!(report["sweep"]["segments"].as_array().unwrap().len() > 3, "{report}");
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("size of a segment"), "{drawn}");
}

#[test]
fn too_few_rounds_have_no_interval() {
    let few = "bench --backend shm --tokens 20 --rounds 5 --small 2";
    let report = json(few, 0);
    assert!(report["gbps"]["interval"].is_null() && report["gbps"]["median"].is_f64(), "{report}");
    assert!(report["ratios"]["memcpy"]["interval"].is_null(), "{report}");
    assert_eq!(report["rounds_for_interval"], 6, "{report}");
    let run = kvx(few);
    assert!(run.stdout.contains("an interval needs --rounds 6 or more"), "{}", run.stdout);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let run = kvx("bench --backend shm,nonsense=1");
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("unknown option \"nonsense\""), "{run:?}");
    assert_eq!(run.stderr.matches("backend shm").count(), 1, "{run:?}");
    assert!(!run.stderr.contains("named_by"), "{run:?}");
    let error = json("bench --backend mock", 3);
    assert!(error["error"]["message"].as_str().unwrap().contains("one process"), "{error}");
    // The command line is right; what it names fails.
    let error = json(&format!("{SMALL} --peer-command false"), 1);
    assert!(error["error"]["message"].as_str().unwrap().contains("has ended"), "{error}");
    let begun = Instant::now();
    let error = json(&format!("{SMALL} --peer-seconds 1 --peer-command cat>/dev/null"), 1);
    assert!(error["error"]["message"].as_str().unwrap().contains("nothing in its turn"), "{error}");
    assert!(error["error"]["remedy"].as_str().unwrap().contains("--peer-seconds"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // What the other engine says is wrong, and what to do about it, is said once.
    let run = kvx("bench --backend shm,node=4000");
    assert_eq!(run.code, 3, "{run:?}");
    let remedy = run.stderr.rsplit("; ").next().unwrap().trim();
    assert!(run.stderr.contains("the other engine") && remedy.len() > 10, "{run:?}");
    assert_eq!(run.stderr.matches(remedy).count(), 1, "{run:?}");
    // Two hundred terabytes.
    let error = json("bench --tokens 16 --producer blocks=100000000", 3);
    assert!(error["error"]["message"].as_str().unwrap().contains("too little memory"), "{error}");
    assert!(error["error"]["remedy"].as_str().unwrap().contains("--tokens"), "{error}");
    for (place, remedy) in [("no/such/folder/bench.svg", "make the folder"), (".", "name a file")] {
        let begun = Instant::now();
        let error = json(&format!("bench --rounds 10000 --svg {place}"), 1);
        assert!(begun.elapsed() < Duration::from_secs(10), "it was measured first");
        assert!(error["error"]["remedy"].as_str().unwrap().contains(remedy), "{error}");
    }
    // Where it cannot be written once all is measured, what was measured is there all the same.
    #[cfg(target_os = "linux")]
    {
        let bench = "--json bench --backend shm --tokens 64 --rounds 6 --small 5 --svg /dev/full";
        let run = kvx(bench);
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        assert!(report["gbps"]["median"].as_f64().unwrap() > 0.0, "{run:?}");
        assert!(run.stderr.contains("/dev/full cannot be written"), "{run:?}");
        assert_eq!(run.code, 1, "{run:?}");
    }
    for command in ["bench --rounds 10000 --svg -", "plan --svg -"] {
        let error = json(command, 2);
        assert!(error["error"]["remedy"].as_str().unwrap().contains("name a file"), "{error}");
    }
    assert!(!Path::new("-").exists());
    json("bench --rounds 0", 2);
    json("bench --producer layout=sideways", 2);
}

/// What the connector costs is measured, and what it moved is verified.
#[test]
fn the_connector_is_measured_beside_a_bare_port() {
    let report = json("bench --connector --backend shm --small 40", 0);
    assert_eq!((&report["verified"], &report["backend"]), (&true.into(), &"shm".into()));
    let positive = |value: &Value| value.as_f64().is_some_and(|figure| figure > 0.0);
    let costs = &report["cpu_us_per_request"];
    for field in ["publish", "fetch", "fetch_one_by_one", "bare", "bare_one_by_one"] {
        assert!(positive(&costs[field]), "{field}: {report}");
    }
    for field in ["connector", "bare", "raw_rtt"] {
        for quantile in ["p50", "p99"] {
            assert!(positive(&report["latency_us"][field][quantile]), "{field}: {report}");
        }
    }
    assert!(positive(&report["requests_per_second"]), "{report}");
    assert!(report["messages_with_data"].as_u64().unwrap() >= 80, "{report}");
    assert!(kvx("bench --connector --backend shm --small 20").stdout.contains("added"));
    json("bench --connector --tokens 5", 2);
}
