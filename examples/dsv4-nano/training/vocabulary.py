"""Closed sets of words that samples are filled with, and the filler of system prompts."""


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


CITIES = words(
    "Beijing Hangzhou Shanghai Shenzhen Paris London Berlin Tokyo Rome Madrid Vienna Boston Chicago Sydney "
    "Toronto Dublin Munich Hamburg Seoul Delhi Mumbai Cairo Athens Prague Warsaw Lima Quito Bogota Havana Denver "
    "Dallas Seattle Austin Miami Geneva Zurich Milan Naples Venice Lyon Nice Porto Seville Moscow Kyoto Osaka "
    "Nanjing Wuhan Chengdu Xian Tianjin Bangkok Hanoi Manila Jakarta Singapore Melbourne Perth Auckland Tehran "
    "Baghdad Ankara Tunis Accra Lagos Kampala"
)
HELD_OUT_CITIES = words(
    "Lisbon Oslo Nairobi Helsinki Montreal Brussels Dakar Santiago Budapest Istanbul Bristol Leipzig"
)
CODE_WORDS = words(
    "falcon river marble tiger copper lantern orange violet summer winter garden bridge castle rocket silver "
    "golden ocean desert forest mountain thunder crystal diamond shadow mirror candle anchor compass feather "
    "harbor island jungle kettle lemon magnet needle olive pepper quartz ribbon saddle temple umbrella velvet "
    "walnut yellow zebra basket"
)
NAMES = words(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Rosa Sam Tina Victor "
    "Wang Li Chen Yuki Ahmed Fatima Ivan Olga Pedro Lucia"
)
COLORS = words("red blue green black white purple brown pink grey turquoise")
PETS = words("dog cat horse rabbit parrot turtle hamster goldfish snake pony")
SYLLABLES = words("ba be bo da di do fa fe ka ki ko la le lo ma mi mo na ne no pa pe ra ri ro sa so ta ti to va vi za")

POLICY = [
    "Answer in a friendly way and keep your answers short.",
    "Do not give legal or medical advice.",
    "If you are not sure, say that you do not know.",
    "Always write complete sentences and use simple words.",
    "The office is open from nine to five on weekdays.",
    "Customers may return a product within thirty days.",
    "Shipping inside the country takes two or three days.",
    "Never share the data of one customer with another one.",
    "If a customer is angry, stay calm and polite.",
    "Refunds are paid to the same account within a week.",
    "The warranty of every device is two years.",
    "Please do not discuss politics in this chat.",
    "Orders above one hundred euros are shipped for free.",
    "A new password can be requested on the login page.",
    "The newsletter is sent on the first day of every month.",
    "Gift cards are valid for three years after the purchase.",
    "Our engineers look at every error report on the same day.",
    "Large files must be sent through the upload page.",
    "Meetings with the team take place on Tuesday and Thursday.",
    "The phone line is closed on Sunday and on holidays.",
    "When you explain a command, show one example.",
    "Use the metric system for all lengths and weights.",
    "The server room is cooled by water from the lake.",
    "Every rack holds four machines with eight devices each.",
    "Backups are written every night and kept for ninety days.",
    "The monitoring page shows the load of every device.",
    "A request that waits longer than one minute is cancelled.",
    "New models are tested for a week before they are used.",
    "Logs older than a month are removed automatically.",
    "The team answers questions about billing by mail only.",
    "Visitors have to sign the book at the front desk.",
    "Lunch is served between twelve and two in the main hall.",
    "The library on the second floor is open to everyone.",
    "Bicycles can be left in the yard behind the building.",
    "In case of fire use the stairs and not the elevator.",
    "The parking space costs two euros for every hour.",
    "Old hardware is collected and recycled once a year.",
    "The test cluster may be restarted at any time.",
    "Tickets with high priority are handled first.",
    "Every change needs a review by a second person.",
]
