//! Steps and reports as bytes.

use super::*;

/// A step with everything in it.
fn full_step() -> StepMetadata {
    let groups = [attention(16), state()];
    let mut both = config("both", &groups);
    both.host_buffer = true;
    let mut both = connector(both);
    let params = ticket_for(&groups, 40, &[&[7, 3, 12], &[5]]);
    let ask = Ask::from("d", 41, params);
    both.matched_tokens(&ask.request(), 0).unwrap();
    both.after_alloc(&ask.id, &tables(&[&[8, 9, 10], &[11]]), 40).unwrap();
    both.publish(&Ask::new("p", 40, for_decode()), &[&[1, 2, 3], &[4]]);
    let mut step = both.step();
    let source = Source { replica: 3, ..connector(config("x", &groups)).some_source() };
    step.holds.push(Hold { attempt: 8, deadline: NOW, source: source.clone() });
    step.releases.push(Release { attempt: 9, source: source.clone() });
    step.aborts.push(7);
    step.withdrawals.push(Withdrawal { lease: source.lease, why: Reason::Failed });
    step.expects.push(Expect { lease: source.lease, key: source.key.clone() });
    let tables = vec![Table { first: 1, ids: vec![2, 3] }];
    let (lease, key) = (source.lease, source.key.clone());
    step.saves.push(Save { lease, part: 2, tokens: 16..40, tables: tables.clone() });
    let (request, ttl, hard) = (id("p"), Duration::from_secs(30), NOW);
    step.grants.push(Grant {
        lease,
        key,
        request,
        tokens: 40,
        ttl,
        hard,
        fingerprint: Fingerprint(5),
        parts: 3,
        tables: tables.clone(),
    });
    step.loads.push(Load {
        attempt: 10,
        replaces: Some(6),
        request: id("d"),
        source,
        deadline: NOW,
        announced: true,
        tokens: 0..40,
        local: tables,
        remote: Vec::new(),
    });
    step
}

impl SchedulerConnector {
    fn some_source(&mut self) -> Source {
        let groups = [attention(16), state()];
        let ask = Ask::from("s", 41, ticket_for(&groups, 40, &[&[7, 3, 12], &[5]]));
        self.on_new_request(&ask.request()).unwrap();
        self.step().holds.remove(0).source
    }
}

#[test]
fn a_step_is_read_as_it_was_written() {
    let step = full_step();
    assert!(!step.loads.is_empty() && !step.grants.is_empty());
    assert_eq!(StepMetadata::decode(&step.encode().unwrap()).unwrap(), step);
    let empty = StepMetadata::new(step.engine, 7);
    assert!(empty.is_empty() && !step.is_empty());
    assert_eq!(StepMetadata::decode(&empty.encode().unwrap()).unwrap(), empty);
}

fn full_report() -> WorkerReport {
    let engine = Incarnation::from_bytes([3; 16]);
    let mut report = WorkerReport::new(engine, 5);
    let lease = LeaseName { owner: engine, number: 4, epoch: 1 };
    report.ended.push(LeaseEnd { lease, why: Reason::Expired });
    let mut end = LoadEnd::new(3, LoadOutcome::Retry, "no route");
    end.blocks = vec![(0, 4), (1, 70_000)];
    end.quarantined = vec![(1, 70_000)];
    report.loads.push(end);
    report.quiet.push(2);
    report.stats = WorkerStats { loads: 1, bytes: 1 << 40, ..WorkerStats::default() };
    report
}

#[test]
fn a_report_is_read_as_it_was_written() {
    let report = full_report();
    assert_eq!(WorkerReport::decode(&report.encode().unwrap()).unwrap(), report);
}

#[test]
fn a_reason_is_made_to_fit() {
    let mut report = full_report();
    report.loads[0].reason = format!("a\nb{}", "ä".repeat(1000));
    let read = WorkerReport::decode(&report.encode().unwrap()).unwrap();
    assert!(read.loads[0].reason.starts_with("a\\nbää"));
    assert!(read.loads[0].reason.len() <= LoadEnd::MAX_REASON);
}

#[test]
fn too_much_is_refused_by_name() {
    let mut report = full_report();
    report.ended = vec![report.ended[0]; WorkerReport::MAX_ITEMS + 1];
    assert!(report.encode().unwrap_err().to_string().contains("ended: too many"));
    let mut step = full_step();
    step.aborts = vec![1; StepMetadata::MAX_ITEMS + 1];
    let error = StepMetadata::decode(&step.encode().unwrap()).unwrap_err().to_string();
    assert!(error.contains("aborts: 4097 items; the limit is 4096"), "{error}");
}

#[test]
fn another_version_is_refused_with_both() {
    let mut bytes = full_step().encode().unwrap();
    bytes[0] = 9;
    let error = StepMetadata::decode(&bytes).unwrap_err();
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!((mismatch.field.as_ref(), mismatch.right.1.as_str()), ("version", "9"));
    assert!(StepMetadata::decode(&bytes[..1]).is_err());
    assert!(WorkerReport::decode(&[]).is_err());
}

#[test]
fn bytes_cut_anywhere_or_changed_anywhere_do_not_panic() {
    for bytes in [full_step().encode().unwrap(), full_report().encode().unwrap()] {
        for length in 0..bytes.len() {
            assert!(StepMetadata::decode(&bytes[..length]).is_err());
            assert!(WorkerReport::decode(&bytes[..length]).is_err());
        }
        for at in 0..bytes.len() {
            for byte in [0, 0x7f, 0x80, 0xc0, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = byte;
                drop(StepMetadata::decode(&bytes));
                drop(WorkerReport::decode(&bytes));
            }
        }
    }
}

/// More than fits one step goes into the next, in order.
#[test]
fn a_step_is_bounded() {
    let mut p = producer(&[attention(16)]);
    let count = StepMetadata::MAX_ITEMS + 1;
    for i in 0..count {
        let ask = Ask::new(&format!("r{i}"), 16, for_decode());
        p.on_new_request(&ask.request()).unwrap();
        p.after_alloc(&ask.id, &tables(&[&[1]]), 0).unwrap();
        p.finish(&ask, FinishStatus::LengthCapped, 16, &[&[1]]);
        p.finish(&ask, FinishStatus::Aborted, 16, &[&[1]]);
    }
    let first = p.step();
    assert_eq!((first.expects.len(), first.grants.len(), first.withdrawals.len()), (4096, 4096, 0));
    assert!(p.has_pending(NOW));
    let second = p.step();
    assert_eq!((second.expects.len(), second.grants.len(), second.withdrawals.len()), (1, 1, 4096));
    assert_eq!(p.step().withdrawals.len(), 1);
    assert!(!p.has_pending(NOW));
}
