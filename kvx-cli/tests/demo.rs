//! The main job: the caches of a trace's requests, moved between two engines, every element checked.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::{command, json, kvx};

/// Small enough for a test.
const SMALL: &str = "--requests 6 --max-tokens 700 --volume 4M";

fn demo(arguments: &str, code: i32) -> Value {
    json(&format!("demo {arguments}"), code)
}

pub(crate) fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field}: {report}"))
}

/// Runs a demo that must succeed, and checks what any such demo says.
fn good(arguments: &str) -> Value {
    checked(&mut command(&format!("--json demo {arguments}")), 0)
}

/// Runs a demo with `--json`, which must end with `code`, and checks what any such demo says.
pub(crate) fn checked(command: &mut Command, code: i32) -> Value {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{command:?}: {output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!(number(&report, "wrong"), 0);
    assert!(number(&report, "elements") > 0 && number(&report, "watched") > 0, "{report}");
    let tokens = number(&report, "tokens");
    assert_eq!(number(&report, "tokens_moved") + number(&report, "tokens_reused"), tokens);
    let (bytes, seconds) = (number(&report, "bytes"), report["seconds"].as_f64().unwrap());
    let gbps = report["gbps"].as_f64().unwrap();
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let expected = bytes as f64 / seconds / 1e9;
    assert!((gbps - expected).abs() <= expected * 1e-9, "{report}");
    report
}

/// A real trace where there is one, else one of the same shape.
fn trace() -> PathBuf {
    let shared =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/conversation_trace.jsonl");
    if let Some(path) = std::env::var_os("KVX_TRACE") {
        return path.into();
    }
    if shared.exists() {
        return shared;
    }
    let generator = kvx_cli::trace::Generator { seed: 5, longest: 20_000 };
    let mut text = String::new();
    for entry in kvx_cli::trace::generate(generator, 40) {
        writeln!(text, "{}", serde_json::to_string(&entry).unwrap()).unwrap();
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("generated.jsonl");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn what_is_printed_has_all_that_others_read() {
    let report = good(SMALL);
    assert_eq!(number(&report, "requests"), 6);
    assert!(number(&report, "bytes") > 0 && number(&report, "segments") > 0);
    let (backend, transport) =
        if cfg!(feature = "shm") { ("shm", "shm") } else { ("mock", "mock-rc") };
    assert_eq!(report["backend"], backend);
    assert_eq!(report["transport"], transport);
    assert_eq!(report["in_process"], backend == "mock");
    assert_eq!(report["mode"], "read");
    assert_eq!(report["initiator"], "consumer");
    assert_eq!(report["seed"], 0);
    assert_eq!(report["model"], "llama-3.1-8b");
    assert_eq!(report["producer"], "tp=2,layout=flash-attention-hnd,block=16");
    assert_eq!(report["consumer"], "tp=4,layout=flash-attention-nhd,block=32");
    assert_eq!(report["scale"]["layers"][0], 32);
    assert!(report["scale"]["factor"].as_f64().unwrap() > 1.0);
    assert_eq!(report["mismatches"], serde_json::json!([]));
    assert_eq!(report["changed"], serde_json::json!([]));
}

#[test]
fn people_are_told_the_same() {
    let run = kvx(&format!("demo {SMALL}"));
    assert_eq!((run.code, &*run.stderr), (0, ""), "{run:#?}");
    for words in [
        "geometry scaled 1/",
        "layers 32 → 2",
        if cfg!(feature = "shm") {
            "backend   shm (two processes): "
        } else {
            "backend   mock (in-process): no fabric backend is built in"
        },
        "transfers are started by the consumer, which reads",
        "verified",
        "the consumer held",
    ] {
        assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
    }
    let named = kvx(&format!("demo {SMALL} --backend mock"));
    assert!(named.stdout.contains("mock (in-process): asked for by name"), "{}", named.stdout);
}

#[test]
fn the_same_seed_gives_the_same_numbers_and_another_others() {
    let numbers = |arguments: &str| {
        let report = good(arguments);
        ["bytes", "segments", "tokens", "tokens_reused"].map(|field| number(&report, field))
    };
    let first = numbers(SMALL);
    assert_eq!(numbers(SMALL), first);
    assert_ne!(numbers(&format!("{SMALL} --seed 1")), first);
}

#[test]
fn shapes_of_all_sorts_are_moved_in_both_modes() {
    for (producer, consumer) in [
        ("tp=1", "tp=1"),
        ("tp=3,layout=nhd", "tp=2,layout=hnd,block=16"),
        ("tp=16", "tp=1,block=48"),
        ("tp=1,dp=2", "tp=16,dp=3"),
        ("tp=2,pp=2", "tp=1,pp=1"),
        ("tp=1,layout=cross-layer-hnd", "tp=2,pp=2,layout=cross-layer-nhd,block=16"),
        ("layout=flash-infer-hnd,regions=layer", "layout=packed-nhd,regions=single"),
        ("layout=packed-hnd,kernel=8", "layout=flash-infer-nhd,block=64,kernel=16"),
        ("layout=pallas", "tp=2,layout=nhd"),
    ] {
        for mode in ["read", "write"] {
            let shapes = format!("--producer {producer} --consumer {consumer} --mode {mode}");
            let report = good(&format!("{SMALL} {shapes}"));
            assert_eq!(report["mode"], mode);
            assert_eq!(report["initiator"], if mode == "read" { "consumer" } else { "producer" });
            assert!(number(&report, "notifications") >= 6, "{report}");
        }
    }
}

#[test]
fn a_transposed_layout_is_moved_element_by_element() {
    let report = good(
        "--requests 2 --max-tokens 100 --volume 1M --producer layout=cpu-transposed --consumer layout=hnd",
    );
    // Two bytes at a time, keys at least.
    assert!(number(&report, "segments") * 4 > number(&report, "bytes") / 2, "{report}");
}

#[test]
fn models_of_all_sorts_are_moved() {
    for model in [
        "gemma-3-4b",
        "gpt-oss-20b",
        "llama-4-scout",
        "deepseek-v3",
        "deepseek-v3.2",
        "nemotron-h-8b",
        "qwen3-next-80b-a3b",
    ] {
        let report = good(&format!("--requests 4 --max-tokens 1300 --volume 4M --model {model}"));
        assert_eq!(report["model"], model);
    }
}

/// Layers with a window move less, however their block tables are kept.
#[test]
fn windows_are_kept_and_save_bytes() {
    let all = "--requests 8 --max-tokens 3000 --volume 8M --model gemma-3-4b --producer block=16 --consumer block=16";
    let bytes = |groups: &str| {
        let (from, to) = groups.split_once(' ').unwrap();
        let report = good(
            &all.replace("--producer ", &format!("--producer groups={from},"))
                .replace("--consumer ", &format!("--consumer groups={to},")),
        );
        number(&report, "bytes")
    };
    let shared = bytes("shared shared");
    assert_eq!(bytes("window window"), shared);
    assert_eq!(bytes("shared window"), shared);
    assert_eq!(bytes("window shared"), shared);
}

#[test]
fn a_model_from_a_configuration_is_moved() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny-model");
    std::fs::create_dir_all(&directory).unwrap();
    let config = directory.join("config.json");
    let text = r#"{"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 24, "hidden_size": 144, "torch_dtype": "float16"}"#;
    std::fs::write(&config, text).unwrap();
    let report = good(&format!("--requests 4 --max-tokens 300 --model {}", config.display()));
    assert_eq!(report["model"], "tiny-model");
    assert_eq!(report["scale"]["factor"], 1.0);
}

#[test]
fn a_prefix_that_is_held_is_not_moved_again() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("prefix.jsonl");
    let line = |at: u64, ids: &[u64]| {
        let length = ids.len() as u64 * 512 - 100;
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {length}, \"output_length\": 9, \"hash_ids\": {ids:?}}}\n"
        )
    };
    let shared = line(0, &[1, 2, 3]) + &line(10, &[1, 2, 4]) + &line(20, &[1, 2, 3, 5]);
    std::fs::write(&path, shared).unwrap();
    let arguments = format!("--volume 4M --trace {}", path.display());
    let report = good(&arguments);
    // The second holds two blocks; so does the third, whose third block was cut short before.
    assert_eq!(number(&report, "tokens_reused"), 2048);
    assert_eq!(number(&report, "tokens"), 2 * 1436 + 1948);
    let bytes = number(&report, "bytes");
    // In a pool too small to keep anything, all of it is moved.
    let apart = line(0, &[1, 2, 3]) + &line(10, &[6, 7, 4]) + &line(20, &[8, 9, 3, 5]);
    std::fs::write(&path, apart).unwrap();
    let all = good(&arguments);
    assert_eq!(number(&all, "tokens_reused"), 0);
    assert!(number(&all, "bytes") > bytes + bytes / 2, "{bytes} {all}");
}

#[test]
fn a_pool_that_is_short_makes_room() {
    let report = good(
        "--requests 20 --max-tokens 900 --volume 4M --producer blocks=60 --consumer blocks=31",
    );
    assert_eq!(number(&report, "requests"), 20);
    let error =
        &demo("--requests 20 --max-tokens 900 --volume 4M --consumer blocks=20", 2)["error"];
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("does not fit into the pool"), "{message}");
    assert!(message.contains("give blocks="), "{message}");
}

#[test]
fn a_trace_is_replayed() {
    let trace = trace();
    let report =
        good(&format!("--requests 12 --max-tokens 2500 --volume 16M --trace {}", trace.display()));
    assert_eq!(number(&report, "requests"), 12);
    assert_eq!(report["trace"], trace.display().to_string());
}

#[test]
fn timestamps_are_kept_to() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("times.jsonl");
    let line = |at: u64| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 40, \"output_length\": 1, \"hash_ids\": [{at}]}}\n"
        )
    };
    std::fs::write(&path, line(1000) + &line(3000) + &line(5000)).unwrap();
    let report = good(&format!("--volume 1M --speed 4 --trace {}", path.display()));
    assert!(report["total_seconds"].as_f64().unwrap() >= 1.0, "{report}");
}

#[test]
fn a_bad_trace_is_refused_by_line_and_reason() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad.jsonl");
    let good =
        "{\"timestamp\": 0, \"input_length\": 40, \"output_length\": 1, \"hash_ids\": [1]}\n";
    std::fs::write(&path, format!("{good}{}", good.replace("[1]", "[1, 2]"))).unwrap();
    let arguments = format!("--trace {}", path.display());
    let error = demo(&arguments, 2)["error"]["message"].to_string();
    assert!(error.contains("line 2: 2 hash_ids; 40 tokens need 1,"), "{error}");
    let error = demo("--trace nowhere.jsonl", 2)["error"]["message"].to_string();
    assert!(error.contains("nowhere.jsonl cannot be opened"), "{error}");
}

/// The ports alone move the same, and say so.
#[test]
fn a_bare_port_moves_the_same_bytes() {
    for mode in ["read", "write"] {
        let whole = good(&format!("{SMALL} --mode {mode}"));
        let bare = good(&format!("{SMALL} --mode {mode} --bare"));
        for field in ["bytes", "segments", "tokens", "tokens_reused", "elements", "transport"] {
            assert_eq!(whole[field], bare[field], "{field}");
        }
        assert_eq!((&whole["through"], &bare["through"]), (&"connector".into(), &"port".into()));
        assert_eq!(
            (&whole["integrity"], &bare["integrity"]),
            (&(mode == "read").into(), &false.into())
        );
        assert_eq!(bare["messages_by_channel"], 0);
        let messages = number(&whole, "messages_with_data") + number(&whole, "messages_by_channel");
        assert!(messages > 0, "{whole}");
    }
    let unchecked = good(&format!("{SMALL} --no-integrity"));
    assert_eq!((&unchecked["integrity"], &unchecked["digests"]), (&false.into(), &0.into()));
}

/// What the check is worth: damage is found, wherever it is done, and named.
#[test]
fn damage_is_found_and_named() {
    for (what, rest) in [
        ("byte", ""),
        ("byte", "--mode write --model nemotron-h-8b"),
        ("byte", "--model deepseek-v3"),
        ("segment", ""),
        ("segment", "--mode write"),
        ("segment", "--model gemma-3-4b --consumer layout=packed-nhd"),
    ] {
        let report = demo(&format!("{SMALL} --corrupt {what} {rest}"), 1);
        assert_eq!(report["verified"], false);
        let wrong = number(&report, "wrong");
        assert!(if what == "byte" { wrong == 1 } else { wrong >= 1 }, "{report}");
        let first = &report["mismatches"][0];
        for field in ["request", "rank", "layer", "block", "head", "dim"] {
            assert!(first[field].is_u64(), "{field}: {report}");
        }
        assert_ne!(first["expected"], first["found"]);
        assert_eq!(first["request"], 3, "{report}");
        if !rest.is_empty() {
            continue;
        }
        let run = kvx(&format!("demo {SMALL} --corrupt {what} {rest}"));
        assert_eq!(run.code, 1);
        let report = format!("WRONG request 3 rank {}: (layer {}", first["rank"], first["layer"]);
        assert!(run.stdout.contains(&report) && run.stdout.contains("FAILED"), "{}", run.stdout);
    }
}

#[test]
fn other_presets_of_the_mock_are_chosen_by_option() {
    for (preset, transport) in [("efa", "mock-srd"), ("ucx-tcp", "mock-tcp")] {
        let report = good(&format!("{SMALL} --backend mock,preset={preset}"));
        assert_eq!(report["transport"], transport);
    }
}

#[test]
fn what_cannot_be_has_its_exit_code() {
    for (arguments, code, says) in [
        ("--backend verbs", 3, "--backend: backend verbs is not built in; built in: mock"),
        ("--backend ,preset=efa", 2, "names no backend"),
        ("--backend mock,preset=nothing", 2, "no preset is named \"nothing\""),
        ("--backend mock,nonsense=1", 2, "unknown option \"nonsense\""),
        ("--backend mock,nonsense", 2, "\"nonsense\" is not name=value"),
        ("--backend mock,,,", 2, "an option is empty (options_from=--backend)"),
        ("--backend mock,seed=1,", 2, "no comma before the first or after the last"),
        ("--backend mock,seed=1,preset=rc,seed=2", 2, "option \"seed\" is given twice"),
        ("--requests 0", 2, "'--requests <REQUESTS>': give 1 to 1000000; see kvx demo --help"),
        ("--max-tokens 0", 2, "'--max-tokens <N>': give 1 or more; see kvx demo --help"),
        ("--speed 0", 2, "--speed"),
        ("--speed x", 2, "--speed"),
        ("--memory 1", 3, "raise --memory"),
        ("--memory 1", 3, "(layers=2, producer blocks="),
        ("--memory lots", 2, "512M or 8G"),
        ("--producer dtype=f16", 4, "producer has f16, consumer has bf16"),
        ("--model gemma-3-4b --producer tp=0", 2, "tp=0"),
        ("--full-size --volume 1G", 2, "cannot be used with"),
    ] {
        let run = kvx(&format!("demo {arguments}"));
        assert_eq!(run.code, code, "{arguments}: {run:#?}");
        assert!(run.stderr.contains(says) && run.stderr.lines().count() == 1, "{run:#?}");
    }
}

/// Options of the backend that the environment names are in a variable of their own, and whoever writes them behind the name is told.
#[test]
fn options_behind_the_name_in_the_environment_are_told_their_place() {
    let mut program = command(&format!("--json demo {SMALL}"));
    let output = program.env("KVX_BACKEND", "mock,seed=1,preset=rc").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("KVX_BACKEND=mock KVX_BACKEND_OPTIONS=seed=1,preset=rc"), "{said}");
}

/// Options of the environment are for the backend that it names: another one that the command names has none of them.
#[test]
fn options_of_the_environment_do_not_reach_another_backend() {
    let run = |name: &str, options: &str, backend: &str| {
        let mut program = command(&format!("demo {SMALL} {backend}"));
        let output =
            program.env("KVX_BACKEND", name).env("KVX_BACKEND_OPTIONS", options).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run("ucx", "tls=tcp", "--backend mock").0, Some(0));
    for backend in ["", "--backend mock"] {
        let (code, said) = run("mock", "tls=tcp", backend);
        assert!(
            code == Some(2) && said.contains("mend the options in KVX_BACKEND_OPTIONS"),
            "{said}"
        );
    }
    let (code, said) = run("", "seed=1", "--backend mock");
    assert!(
        code == Some(2) && said.contains("set KVX_BACKEND beside KVX_BACKEND_OPTIONS"),
        "{said}"
    );
}
