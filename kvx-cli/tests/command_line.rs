//! What the program says and how it ends: exit codes, errors, JSON.

use crate::common::{json, kvx};

#[test]
fn every_way_to_end_has_its_exit_code() {
    for (arguments, code, says) in [
        ("plan", 0, ""),
        ("--help", 0, ""),
        ("--version", 0, ""),
        ("", 2, "Usage: kvx"),
        ("pla", 2, "unrecognized subcommand 'pla'"),
        ("plan --mode push", 2, "possible values: read, write"),
        ("plan --tokens 0", 2, "give 1 to 16777216; see kvx plan --help"),
        ("plan --tokens x", 2, "it is not a whole number, 0 or more; see kvx plan --help"),
        ("plan --tokens 9999999", 2, "(limit=20,000,000); ask for at most about 39,062 tokens"),
        ("plan --tokens 2048 --consumer layout=cpu-transposed", 2, "about 67,141,632 segments"),
        (
            "plan --tokens 9999999 --producer layout=nhd,tp=1,block=1 --consumer layout=nhd,tp=1,block=1",
            2,
            "639,999,936 runs to merge (limit=268,435,456)",
        ),
        ("plan --producer tp=65536", 2, "2,097,152 layers to lay out (limit=131,072"),
        ("plan --model nowhere", 2, "is neither a preset nor a file"),
        ("plan --dtype f7", 2, "unknown dtype"),
        ("plan --producer tq=1", 2, "tp (tensor parallel ranks)"),
        ("plan --producer tp=0", 2, "tp=0"),
        ("plan --producer block=16,kernel=5", 2, "--producer: kernel=5 does not divide block=16"),
        ("plan --producer blocks=8", 2, "give blocks=33 or more"),
        ("plan --consumer layout=cross-layer-nhd,regions=layer", 2, "cross-layer"),
        ("plan --producer dtype=f16", 4, "producer has f16, consumer has bf16"),
        ("plan --svg no/such/directory.svg", 1, "cannot be written"),
    ] {
        let run = kvx(arguments);
        assert_eq!(run.code, code, "kvx {arguments}: {run:#?}");
        assert!(run.stderr.contains(says), "kvx {arguments}: {run:#?}");
        assert_eq!(run.stderr.is_empty(), code == 0, "kvx {arguments}: {run:#?}");
        let lines = run.stderr.lines().count();
        assert!(code == 0 || arguments.is_empty() || lines == 1, "kvx {arguments}: {run:#?}");
        assert_eq!(run.stdout.is_empty(), code != 0, "kvx {arguments}: {run:#?}");
    }
    assert!(kvx("--help").stdout.contains("Exit codes:"));
    let help = kvx("demo --help").stdout;
    for words in
        ["cross-layer-packed-hnd", "qwen3-next-80b-a3b", "kvx backends NAME", "an error also"]
    {
        assert!(help.contains(words), "{words}: {help}");
    }
}

#[test]
fn with_json_an_error_is_a_document_too() {
    let error = &json("plan --producer dtype=f16", 4)["error"];
    assert_eq!(error["kind"], "mismatch");
    assert_eq!(error["field"], "layer 0 K dtype");
    assert_eq!((&error["producer"], &error["consumer"]), (&"f16".into(), &"bf16".into()));
    assert_eq!(json("plan --producer tp=x", 2)["error"]["kind"], "config");
    assert_eq!(json("plan --tokens x", 2)["error"]["kind"], "usage");
    assert_eq!(json("plan --svg no/such/directory.svg", 1)["error"]["exit_code"], 1);
}

#[test]
fn plans_of_every_preset_are_made() {
    for model in ["deepseek-v3.2", "gemma-3-4b", "gpt-oss-20b", "llama-4-scout", "nemotron-h-8b"] {
        let plan = json(&format!("plan --tokens 700 --mode write --model {model}"), 0);
        assert_eq!(plan["model"], model);
        assert_eq!(plan["mode"], "write");
        let order = |field: &str| plan[field].as_u64().unwrap();
        assert!(order("shortest_run") <= order("median_run"), "{plan}");
        assert!(order("median_run") <= order("longest_run"), "{plan}");
        assert!(order("segments") > 0 && order("bytes") > 0, "{plan}");
    }
}

#[test]
fn a_table_is_printed_for_people() {
    let run = kvx("plan --producer pp=2");
    for words in [
        "llama-3.1-8b: 512 tokens",
        "rank 3 (tp 1, pp 1)",
        "8 pairs",
        "262,144",
        "Costly: the block is ",
        "on both sides: 16,384 segments",
    ] {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
}

#[test]
fn backends_are_listed_with_what_they_can_do() {
    let list = json("backends", 0);
    let mock = &list["backends"][0];
    assert_eq!((&mock["name"], &mock["state"]), (&"mock".into(), &"available".into()));
    assert_eq!(mock["capabilities"]["read"], true);
    assert_eq!(mock["rank"], serde_json::Value::Null);
    let demo_uses = if cfg!(feature = "shm") {
        assert_eq!(list["choice"]["backend"], "shm");
        "kvx demo uses shm"
    } else {
        assert!(list["choice"]["error"]["remedy"].is_string());
        "kvx demo uses the mock"
    };
    let run = kvx("backends");
    for words in ["mock", "available", "read, write", "segment 2 GiB", demo_uses, "--options"] {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
    for line in run.stdout.lines().filter(|line| line.starts_with(' ')) {
        assert!(line.chars().count() <= 110, "{line}");
    }
}

#[test]
fn the_options_of_backends_are_listed() {
    let list = json("backends mock", 0);
    assert_eq!(list["backends"].as_array().unwrap().len(), 1, "{list}");
    let names = |list: &serde_json::Value| -> Vec<String> {
        let options = list["backends"][0]["options"].as_array().unwrap().clone();
        options.iter().map(|option| option["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&list), ["preset", "seed"]);
    assert!(json("backends", 0)["backends"][0]["options"].is_null());
    let all = kvx("backends --options").stdout;
    for words in ["preset", "loopback", "default"] {
        assert!(all.contains(words), "{words}: {all}");
    }
    if cfg!(feature = "shm") {
        let shm = kvx("backends shm").stdout;
        for words in ["copy_threads", "microseconds", "16777216", "huge_pages"] {
            assert!(shm.contains(words), "{words}: {shm}");
        }
        assert!(!shm.contains("preset"), "{shm}");
    }
    let error = &json("backends carrier-pigeon", 2)["error"];
    assert!(error["remedy"].as_str().unwrap().contains("mock"), "{error}");
}

/// What cannot be told must not look as if it had been.
#[cfg(target_os = "linux")]
#[test]
fn an_output_that_cannot_be_written_is_an_error() {
    for arguments in ["plan", "plan --json", "--help", "backends", "plan --tokens x --json"] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = crate::common::command(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // A wrong command line is one in any case.
        let wrong = arguments.contains("tokens x");
        assert_eq!(output.status.code(), Some(if wrong { 2 } else { 1 }), "{arguments}: {said}");
        assert!(wrong || said.contains("standard output cannot be written"), "{said}");
    }
    // Whoever wants nothing to be printed gets that.
    assert_eq!(kvx("plan").code, 0);
    let mut silent = crate::common::command("plan");
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").unwrap();
    assert_eq!(silent.stdout(null).status().unwrap().code(), Some(0));
}

/// A reader that has seen enough is no error.
#[test]
fn a_closed_pipe_is_borne_in_silence() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvx"))
        .args(["plan", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

/// What nobody asked for, and yet is so.
#[test]
fn what_is_silently_so_is_remarked() {
    let remarks =
        |arguments: &str| json(&format!("plan --tokens 32 {arguments}"), 0)["remarks"].clone();
    let none: [&str; 0] = [];
    assert_eq!(remarks(""), serde_json::json!(none));
    let copies = "producer ranks 1, 3, 5, 7, 9, 11, 13, 15 hold copies and give nothing";
    assert_eq!(remarks("--producer tp=16"), serde_json::json!([copies]));
    let uneven = "consumer: tp=3 splits the KV heads 2, 3, 3";
    assert_eq!(remarks("--consumer tp=3"), serde_json::json!([uneven]));
    let shown = "consumer: replica 0 of 2 is shown";
    assert_eq!(remarks("--consumer dp=2"), serde_json::json!([shown]));
    let run = kvx("plan --tokens 32 --consumer dp=2");
    assert!(run.stdout.contains(&format!("Note: {shown}")), "{}", run.stdout);
}

/// A hint is worth what it says: the plan that it names has as many segments.
#[test]
fn a_hint_is_true() {
    let plan = json("plan --tokens 64", 0);
    assert_eq!(plan["verdict"], "costly");
    let layout = plan["hint"]["layout"].as_str().unwrap();
    let both = format!("--producer layout={layout} --consumer layout={layout}");
    let better = json(&format!("plan --tokens 64 {both}"), 0);
    assert_eq!(better["segments"], plan["hint"]["segments"]);
    assert!(better["segments"].as_u64() < plan["segments"].as_u64());
    assert_eq!(better["hint"], serde_json::Value::Null);
}
