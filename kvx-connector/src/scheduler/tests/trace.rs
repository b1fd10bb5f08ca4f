//! A real trace's requests, in the order in which they came, through both schedulers.

use std::path::Path;

use super::*;

/// Every request of the trace is prefilled, held, loaded and freed; prompts that begin alike are prefix hits of the consumer.
#[test]
fn a_real_traces_requests_all_end() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/conversation_trace.jsonl");
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!("skipped: there is no trace at {}", path.display());
        return;
    };
    // A hash stands for 512 tokens.
    const HASH: u64 = 512;
    let groups = [attention(64)];
    let (mut p, mut c) = (producer(&groups), consumer(&groups));
    let (mut count, mut hits) = (0, 0);
    let mut seen = BTreeSet::new();
    for (number, line) in text.lines().take(2000).enumerate() {
        let row: Value = serde_json::from_str(line).unwrap();
        let prompt = row["input_length"].as_u64().unwrap();
        let hashes = row["hash_ids"].as_array().unwrap();
        let known = hashes.iter().take_while(|hash| seen.contains(&hash.as_u64())).count() as u64;
        seen.extend(hashes.iter().map(Value::as_u64));
        let computed = (known * HASH).min((prompt - 1) / HASH * HASH);
        let blocks: Vec<_> = (1..).take(usize::try_from(prompt.div_ceil(64)).unwrap()).collect();
        let ask = Ask::new(&format!("p{number}"), prompt, for_decode());
        let (finished, granted) = p.publish(&ask, &[&blocks]);
        assert!(finished.hold);
        let ask = Ask::from(&format!("d{number}"), prompt, finished.params);
        let (tokens, step) = c.load(&ask, computed, &[&blocks]);
        assert_eq!(tokens, prompt - computed);
        let load = &step.loads[0];
        assert_eq!(load.local[0].ids, load.remote[0].table.ids);
        assert_eq!(load.local[0].end(), prompt.div_ceil(64));
        for rank in 0..2 {
            c.loaded(rank, load.attempt);
            p.lease_ended(rank, granted.grants[0].lease, Reason::Done);
        }
        c.finish(&ask, FinishStatus::Stopped, prompt + 1, &[&blocks]);
        hits += u64::from(computed > 0);
        count += 1;
    }
    assert!(count > 0 && hits > 0);
    assert_eq!((p.stats().sent, c.stats().received), (count, count));
    p.assert_idle();
    c.assert_idle();
}
