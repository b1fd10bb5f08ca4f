//! Turns events of `tracing` into records, with the spans that they are in.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use super::Record;

/// Levels from most to least important; the index is what [`LEVEL`] holds.
const LEVELS: [Level; 5] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];

/// The least important level that is kept.
static LEVEL: AtomicU8 = AtomicU8::new(2);

pub(super) fn set_level(level: Level) {
    let index = (0..).zip(LEVELS).find(|(_, one)| *one == level);
    LEVEL.store(index.map_or(2, |(index, _)| index), Ordering::Relaxed);
}

fn level() -> Level {
    LEVELS[usize::from(LEVEL.load(Ordering::Relaxed)).min(LEVELS.len() - 1)]
}

thread_local! {
    /// Spans that this thread is in, the innermost last.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Keeps spans while they are open.
#[derive(Default)]
pub(super) struct Forward {
    spans: Mutex<BTreeMap<u64, Open>>,
    last: AtomicU64,
}

struct Open {
    name: &'static str,
    fields: Text,
    handles: u64,
    parent: Option<u64>,
}

impl Forward {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Open>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `outer{field=value}: inner: `, from a span outwards.
    fn path(&self, innermost: Option<u64>) -> String {
        let spans = self.lock();
        let mut path = String::new();
        let mut at = innermost;
        while let Some(span) = at.and_then(|id| spans.get(&id)) {
            let fields = span.fields.fields.trim_start();
            let shown = match fields.is_empty() {
                true => format!("{}: ", span.name),
                false => format!("{}{{{fields}}}: ", span.name),
            };
            path.insert_str(0, &shown);
            at = span.parent;
        }
        path
    }
}

fn innermost() -> Option<u64> {
    INSIDE.with_borrow(|inside| inside.last().copied())
}

impl Subscriber for Forward {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= level() && metadata.target().starts_with("kvx")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(level().into())
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let mut fields = Text::default();
        attributes.record(&mut fields);
        let parent = match attributes.parent() {
            Some(parent) => Some(parent.into_u64()),
            None if attributes.is_root() => None,
            None => innermost(),
        };
        let name = attributes.metadata().name();
        self.lock().insert(number, Open { name, fields, handles: 1, parent });
        Id::from_u64(number)
    }

    fn record(&self, span: &Id, values: &tracing::span::Record<'_>) {
        if let Some(open) = self.lock().get_mut(&span.into_u64()) {
            values.record(&mut open.fields);
        }
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut said = Text::default();
        event.record(&mut said);
        let within = match event.parent() {
            Some(parent) => Some(parent.into_u64()),
            None if event.is_root() => None,
            None => innermost(),
        };
        let mut text = self.path(within);
        text.push_str(&said.message);
        text.push_str(match said.message.is_empty() {
            true => said.fields.trim_start(),
            false => &said.fields,
        });
        super::put(Record {
            level: *metadata.level(),
            target: metadata.target(),
            text,
            at: SystemTime::now(),
            thread: std::thread::current().name().map(ToOwned::to_owned),
            place: (metadata.file(), metadata.line()),
        });
    }

    fn enter(&self, span: &Id) {
        INSIDE.with_borrow_mut(|inside| inside.push(span.into_u64()));
    }

    fn exit(&self, span: &Id) {
        INSIDE.with_borrow_mut(|inside| {
            if let Some(at) = inside.iter().rposition(|one| *one == span.into_u64()) {
                inside.remove(at);
            }
        });
    }

    fn clone_span(&self, span: &Id) -> Id {
        if let Some(open) = self.lock().get_mut(&span.into_u64()) {
            open.handles += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let mut spans = self.lock();
        let Some(open) = spans.get_mut(&span.into_u64()) else { return false };
        open.handles -= 1;
        let over = open.handles == 0;
        if over {
            spans.remove(&span.into_u64());
        }
        over
    }
}

/// What an event says, and its fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        // Writing to text does not fail.
        let _done = match field.name() {
            "message" => self.message.write_str(value),
            name => write!(self.fields, " {name}={value}"),
        };
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _done = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
