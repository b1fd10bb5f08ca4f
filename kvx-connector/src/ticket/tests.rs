use std::collections::BTreeMap;

use kvx_core::ErrorKind;
use serde_json::{Value, json};

use super::*;

fn ticket() -> Ticket {
    Ticket {
        key: TransferKey::new("from-the-router").unwrap(),
        engine: "prefill-0".parse().unwrap(),
        cards: "10.0.0.1:5600".parse().unwrap(),
        replica: 1,
        tp: 2,
        lease: LeaseName {
            owner: kvx_core::id::Incarnation::from_bytes(std::array::from_fn(|i| {
                u8::try_from(i).unwrap()
            })),
            number: 17,
            epoch: 0,
        },
        access: Access::Read,
        ttl: Duration::from_secs(30),
        tokens: 40,
        parts: Parts::Whole,
        groups: vec![
            TicketGroup {
                kind: GroupKind::Attention,
                block_tokens: 16,
                table: Table { first: 1, ids: vec![3, 70_000] },
            },
            TicketGroup {
                kind: GroupKind::State,
                block_tokens: 1,
                table: Table { first: 9, ids: vec![u32::MAX] },
            },
        ],
    }
}

fn params(ticket: &Ticket) -> Value {
    Value::Object(ticket.to_params("cmpl-1-0").unwrap())
}

#[test]
fn both_forms_are_read_as_they_were_written() {
    for cards in ["10.0.0.1:5600", "[2001:db8::1]:1", "prefill-0.example:65535"] {
        for parts in [Parts::Whole, Parts::Announced] {
            let ticket = Ticket { cards: cards.parse().unwrap(), parts, ..ticket() };
            assert_eq!(Ticket::from_bytes(&ticket.to_bytes().unwrap()).unwrap(), ticket);
            let read = TransferParams::from_json(&params(&ticket)).unwrap();
            assert_eq!(read.transfer_id.as_ref(), Some(&ticket.key));
            assert_eq!((read.remote_prefill, read.remote_decode), (true, false));
            assert_eq!(read.ticket, Some(ticket));
        }
    }
}

/// Names that routers look at are vLLM's, and say what they say there.
#[test]
fn what_vllm_has_a_name_for_is_under_that_name() {
    let expected = json!({
        "do_remote_prefill": true, "do_remote_decode": false,
        "remote_engine_id": "prefill-0", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 2,
        "remote_request_id": "cmpl-1-0", "remote_block_ids": [[3, 70_000], [u32::MAX]],
        "transfer_id": "from-the-router",
        "kvx": {
            "schema": [1, 1], "key": "from-the-router",
            "lease": "000102030405060708090a0b0c0d0e0f/17.0", "ttl": 30000,
            "tokens": 40, "replica": 1, "announced": false, "sum": "3d37693e7ab4ad81",
            "groups": [
                {"kind": "attention", "block_tokens": 16, "first": 1},
                {"kind": "state", "block_tokens": 1, "first": 9},
            ],
        },
    });
    assert_eq!(params(&ticket()), expected);
}

/// A router may move the engine to another address, add what it likes, and leave out what has a default.
#[test]
fn what_a_router_changes_or_adds_is_taken_as_it_comes() {
    let mut changed = params(&ticket());
    changed["remote_host"] = "[::1]".into();
    changed["remote_port"] = 7.into();
    changed["routing"] = json!({"any": ["thing"]});
    changed["kvx"]["later"] = json!([1, {"x": 2}]);
    changed["kvx"]["groups"][0]["later"] = json!(null);
    for name in ["tp_size", "remote_request_id", "transfer_id", "do_remote_decode"] {
        changed[name] = Value::Null;
    }
    let read = TransferParams::from_json(&changed).unwrap().ticket.unwrap();
    assert_eq!((read.cards.to_string().as_str(), read.tp), ("[::1]:7", 1));
    assert_eq!(read.groups, ticket().groups);
    // vLLM before it had groups: one list.
    let mut one = Ticket { groups: vec![ticket().groups[0].clone()], ..ticket() };
    one.groups[0].table.ids = vec![3, 4];
    let mut flat = params(&one);
    flat["remote_block_ids"] = json!([3, 4]);
    assert_eq!(TransferParams::from_json(&flat).unwrap().ticket, Some(one));
}

#[test]
fn requests_without_a_ticket_are_read() {
    assert_eq!(TransferParams::from_json(&Value::Null).unwrap(), TransferParams::default());
    assert_eq!(TransferParams::from_json(&json!({})).unwrap(), TransferParams::default());
    let stock = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null, "transfer_id": "x",
    });
    let read = TransferParams::from_json(&stock).unwrap();
    assert!(read.remote_decode && !read.remote_prefill && read.ticket.is_none());
    assert_eq!(read.transfer_id.unwrap().as_str(), "x");
}

/// Every field that is wrong is named.
#[test]
fn a_wrong_field_is_named() {
    let wrong: &[(&str, Value, &str)] = &[
        ("/do_remote_prefill", json!("yes"), "do_remote_prefill: invalid type"),
        ("/do_remote_decode", json!(1), "do_remote_decode: invalid type"),
        ("/transfer_id", json!("a\nb"), "transfer_id: text with the control character"),
        ("/remote_engine_id", json!(3), "remote_engine_id: invalid type"),
        ("/remote_engine_id", json!("None"), "remote_engine_id: \"None\" is no engine's name"),
        ("/remote_engine_id", Value::Null, "remote_engine_id: is not there"),
        ("/remote_host", json!("a b"), "remote_host: "),
        ("/remote_host", json!("0.0.0.0"), "remote_host: nobody can be reached"),
        ("/remote_host", json!("::"), "remote_host: nobody can be reached"),
        ("/remote_host", json!("x".repeat(300)), "remote_host: text of 300 bytes"),
        ("/remote_port", json!(65_536), "remote_port: invalid value"),
        ("/remote_port", json!(0), "remote_port: nobody can be reached"),
        ("/remote_port", json!("5600"), "remote_port: invalid type"),
        ("/tp_size", json!(-1), "tp_size: invalid value"),
        ("/remote_block_ids", json!("x"), "remote_block_ids: not a list"),
        ("/remote_block_ids", json!([["x"], [1]]), "remote_block_ids: invalid type"),
        ("/remote_block_ids", json!([[1, 2], 3]), "remote_block_ids: invalid type"),
        (
            "/remote_block_ids",
            json!([[3, 4_294_967_296_u64], [1]]),
            "remote_block_ids: invalid value",
        ),
        ("/remote_block_ids", json!([[3, 4]]), "number of cache groups"),
        ("/remote_block_ids", json!([[3], [4]]), "groups: group 0: the table ends with block 2"),
        ("/remote_block_ids", json!(vec![json!([]); 65]), "remote_block_ids: 65 lists"),
        ("/kvx", json!("x"), "kvx: schema"),
        ("/kvx/schema", json!([1]), "kvx: schema"),
        ("/kvx/schema", json!([3, 2]), "schema: 3 to 2 is no range"),
        ("/kvx/schema", json!([2, 3]), "schema"),
        ("/kvx/key", json!("x".repeat(257)), "kvx: key: text of 257 bytes"),
        ("/kvx/lease", json!("00/1.0"), "kvx: lease: not a lease's name"),
        ("/kvx/lease", json!("000102030405060708090a0b0c0d0e0f/+1.0"), "kvx: lease: not a lease's"),
        ("/kvx/lease", json!("0001020304050607é8090a0b0c0d0e0f/1.0"), "kvx: lease: not a lease's"),
        ("/kvx/lease", json!("000102030405060708090a0b0c0d0e0f/0.0"), "lease: leases are numbered"),
        ("/kvx/ttl", json!(1.5), "kvx: ttl: invalid type"),
        ("/kvx/ttl", json!(86_400_001), "ttl: "),
        ("/kvx/tokens", json!(-4), "kvx: tokens: invalid value"),
        ("/kvx/tokens", json!(1_u64 << 41), "tokens: "),
        ("/kvx/tokens", json!(49), "groups: group 0: the table ends with block 3, 49 tokens with"),
        ("/kvx/groups", json!(7), "kvx: groups: invalid type"),
        ("/kvx/groups/0/kind", json!("disc"), "kvx: groups: kind: unknown variant"),
        ("/kvx/groups/0/block_tokens", json!(0), "groups: group 0: block_tokens is 0"),
        ("/kvx/groups/0/block_tokens", json!([]), "kvx: groups: block_tokens: invalid type"),
        ("/kvx/groups/0/first", json!(u64::MAX), "groups: group 0: the table ends with block"),
    ];
    for (field, value, why) in wrong {
        let mut params = params(&ticket());
        *params.pointer_mut(field).unwrap() = value.clone();
        let error = TransferParams::from_json(&params).unwrap_err();
        assert!(error.to_string().contains(why), "{field} {value}: {error} does not say {why:?}");
        assert!(matches!(error.kind(), ErrorKind::Peer | ErrorKind::Unsupported), "{error:?}");
    }
    for field in ["key", "lease", "ttl", "tokens", "groups", "schema"] {
        let mut params = params(&ticket());
        params["kvx"].as_object_mut().unwrap().remove(field);
        let error = TransferParams::from_json(&params).unwrap_err().to_string();
        assert!(error.contains(field), "{error} does not name {field}");
    }
    assert!(TransferParams::from_json(&json!([1])).is_err());
}

/// What a body of bytes consists of.
#[derive(Clone, serde::Serialize)]
#[serde(untagged)]
enum Raw {
    Json(Value),
    Bytes(#[serde(serialize_with = "kvx_core::wire::serialize_bytes")] Vec<u8>),
    List(Vec<Self>),
    Map(BTreeMap<&'static str, Self>),
}

#[test]
fn bytes_name_the_wrong_field_and_pass_over_later_ones() {
    let json = |value: Value| Raw::Json(value);
    let ids = |ids: &[u32]| Raw::Bytes(ids.iter().flat_map(|id| id.to_le_bytes()).collect());
    let group = |kind: &str, block_tokens: u32, first: u64, blocks: Raw| {
        let table = BTreeMap::from([("first", json(first.into())), ("ids", blocks)]);
        Raw::Map(BTreeMap::from([
            ("kind", json(kind.into())),
            ("block_tokens", json(block_tokens.into())),
            ("table", Raw::Map(table)),
        ]))
    };
    let state = || group("state", 1, 9, ids(&[u32::MAX]));
    let lease = (0..16).chain([17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).collect();
    let good = BTreeMap::from([
        ("key", json("from-the-router".into())),
        ("engine", json("prefill-0".into())),
        ("cards", json("10.0.0.1:5600".into())),
        ("replica", json(1.into())),
        ("tp", json(2.into())),
        ("lease", Raw::Bytes(lease)),
        ("ttl", json(30_000.into())),
        ("tokens", json(40.into())),
        ("later", json(json!([1, {"x": [2]}]))),
        ("groups", Raw::List(vec![group("attention", 16, 1, ids(&[3, 70_000])), state()])),
    ]);
    let read = |fields: &BTreeMap<&str, Raw>| {
        let body = kvx_core::wire::to_bytes("test", fields).unwrap();
        Ticket::from_bytes(&[b"kvxT\x01\0\x01\0", body.as_slice()].concat())
    };
    assert_eq!(read(&good).unwrap(), ticket());
    let cut = group("attention", 16, 1, Raw::Bytes(vec![1, 2, 3]));
    for (name, value, why) in [
        ("tokens", json("x".into()), "malformed: tokens: "),
        ("lease", json("x".into()), "malformed: lease: "),
        ("lease", Raw::Bytes(vec![0; 27]), "lease: not a lease's name"),
        ("lease", Raw::Bytes(vec![0; 29]), "lease: 29 items; the limit is 28"),
        ("cards", json("nowhere".into()), "malformed: cards: "),
        ("engine", json("null".into()), "malformed: engine: "),
        ("ttl", json((-1).into()), "malformed: ttl: "),
        ("announced", json(0.into()), "malformed: announced: "),
        ("groups", json(json!([{"kind": "state"}])), "groups: missing field `block_tokens`"),
        ("groups", Raw::List(vec![cut]), "groups: table: ids: the block ids end in the middle"),
        ("groups", Raw::List(vec![state(); 65]), "groups: 65 items; the limit is 64"),
    ] {
        let mut wrong = good.clone();
        wrong.insert(name, value);
        let error = read(&wrong).unwrap_err().to_string();
        assert!(error.contains(why), "{name}: {error} does not say {why:?}");
    }
}

#[test]
fn bytes_of_another_schema_or_of_something_else_are_refused() {
    let good = ticket().to_bytes().unwrap();
    let mut other = good.clone();
    other[4..8].copy_from_slice(&[2, 0, 3, 0]);
    let error = Ticket::from_bytes(&other).unwrap_err();
    let mismatch = error.as_mismatch().unwrap();
    assert_eq!(
        (mismatch.left.1.as_str(), mismatch.right.1.as_str()),
        ("schema 1", "schemas 2 to 3")
    );
    // One that says that it can be read by schema 1 as well.
    other[4..8].copy_from_slice(&[1, 0, 3, 0]);
    assert_eq!(Ticket::from_bytes(&other).unwrap(), ticket());
    for length in 0..good.len() {
        assert!(Ticket::from_bytes(&good[..length]).is_err());
    }
    assert!(Ticket::from_bytes(b"kvxS\x01\0\x01\0\x80").unwrap_err().to_string().contains("kvxT"));
    assert!(Ticket::from_bytes(&vec![0; Ticket::MAX_BYTES + 1]).is_err());
    assert!(Ticket::from_bytes(&[good, vec![0]].concat()).is_err());
}

#[test]
fn what_no_reader_would_take_is_not_written() {
    let many = vec![ticket().groups[0].clone(); 65];
    for (wrong, why) in [
        (Ticket { groups: many, ..ticket() }, "groups: 65 items"),
        (Ticket { groups: Vec::new(), ..ticket() }, "groups: there are 40 tokens and no block"),
        (Ticket { ttl: Duration::from_secs(100_000), ..ticket() }, "ttl"),
        (Ticket { tokens: 33 + 16, ..ticket() }, "group 0"),
    ] {
        for error in [wrong.to_bytes().map(drop), wrong.to_params("r").map(drop)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(why), "{error} does not say {why:?}");
        }
    }
    let empty = Ticket { tokens: 0, groups: Vec::new(), ..ticket() };
    assert_eq!(Ticket::from_bytes(&empty.to_bytes().unwrap()).unwrap(), empty);
}

/// A bit that turns over on the way has other blocks read, or nothing: never what was not meant.
#[test]
fn a_bit_that_turned_over_changes_nothing_that_is_read() {
    let good = ticket();
    let meant = |ticket: &Ticket| {
        (ticket.lease, ticket.access, ticket.tokens, ticket.parts, ticket.groups.clone())
    };
    let bytes = good.to_bytes().unwrap();
    let (mut refused, mut read) = (0, 0);
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut turned = bytes.clone();
            turned[at] ^= 1 << bit;
            // Where the name of the checksum itself is hit, there is none, and nothing else has changed.
            match Ticket::from_bytes(&turned) {
                Ok(ticket) => {
                    read += 1;
                    assert_eq!(meant(&ticket), meant(&good), "byte {at}, bit {bit}");
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 4 * read, "{refused} refused, {read} read");
}

/// What a router has no business with.
#[test]
fn what_a_router_must_not_change_is_refused() {
    let says = |change: fn(&mut Value)| {
        let mut changed = params(&ticket());
        change(&mut changed);
        let error = TransferParams::from_json(&changed).unwrap_err();
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("router")), "{error}");
        assert!(error.to_string().contains("checksum"), "{error}");
    };
    says(|params| params["remote_block_ids"] = json!([[4, 70_000], [u32::MAX]]));
    says(|params| params["remote_block_ids"] = json!([[70_000, 3], [u32::MAX]]));
    says(|params| params["kvx"]["tokens"] = 39.into());
    says(|params| params["kvx"]["writes"] = true.into());
    says(|params| params["kvx"]["announced"] = true.into());
    says(|params| params["kvx"]["groups"][0]["kind"] = "state".into());
    says(|params| params["kvx"]["lease"] = "000102030405060708090a0b0c0d0e0f/18.0".into());
    says(|params| params["kvx"]["sum"] = "0000000000000000".into());
    // One of an earlier version has none.
    let mut earlier = params(&ticket());
    earlier["kvx"].as_object_mut().unwrap().remove("sum");
    assert_eq!(TransferParams::from_json(&earlier).unwrap().ticket, Some(ticket()));
    for wrong in ["", "123", "00000000000000zz", "+000000000000000"] {
        let mut other = params(&ticket());
        other["kvx"]["sum"] = wrong.into();
        let error = TransferParams::from_json(&other).unwrap_err().to_string();
        assert!(error.contains("checksum of 16"), "{wrong}: {error}");
    }
}

/// Sixty-four blocks in as many bytes as they need, and little more.
#[test]
fn bytes_are_few() {
    let table = Table { first: 0, ids: (1000..1064).collect() };
    let group = TicketGroup { kind: GroupKind::Attention, block_tokens: 16, table };
    let bytes = Ticket { tokens: 1024, groups: vec![group], ..ticket() }.to_bytes().unwrap();
    assert!(bytes.len() < 4 * 64 + 256, "{} bytes", bytes.len());
}
